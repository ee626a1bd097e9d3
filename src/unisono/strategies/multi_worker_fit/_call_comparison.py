"""What a call of `fit`, `evaluate` or `predict` must have in common on all workers: pure.

Tests: tests/virtual/strategies/test_call_description.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import keras

from unisono._types import UserValue
from unisono.checkpoint._variable_paths import canonical_paths
from unisono.step._keras_internals import compile_arguments
from unisono.strategies.multi_worker_fit._call_description import described, layers_of, optimizer_of
from unisono.strategies.multi_worker_fit._chief_callbacks import is_chief_only
from unisono.training._fit_extension import FitExtension, flat_callbacks
from unisono.training.stateful._form import held_optimizers

#: Numbers and options that all workers must give alike, and data of which only the size is compared.
_OPTIONS = (
    "batch_size",
    "epochs",
    "initial_epoch",
    "steps",
    "steps_per_epoch",
    "validation_batch_size",
    "validation_steps",
    "validation_freq",
    "shuffle",
    "class_weight",
    "validation_split",
)
#: Arguments of `compile` that are compared, besides the optimizer.
_COMPILED = ("loss", "loss_weights", "metrics", "weighted_metrics")
_DATA = ("x", "y", "sample_weight", "validation_data")


def call_fingerprint(model: keras.Model, arguments: Mapping[str, object]) -> dict[str, str]:
    """Return what must be equal on all workers, by name."""
    fingerprint = {name: described(arguments.get(name)) for name in _OPTIONS}
    fingerprint |= {name: size_of(arguments.get(name)) for name in _DATA}
    paths = canonical_paths(v.path for v in model.variables)
    rows = zip(paths, model.variables, strict=True)
    fingerprint["model"] = "\n".join(
        f"{path} {tuple(v.shape)} {v.dtype}{'' if v.trainable else ' not trainable'}" for path, v in rows
    )
    # What was built in another way differs above.
    fingerprint |= {"layers": layers_of(model), "optimizer": optimizer_of(model.optimizer)}
    fingerprint |= {name: optimizer_of(optimizer) for name, optimizer in held_optimizers(model).items()}
    compiled = compile_arguments(model)
    # Outputs have names that Keras counts up, by which a user may give losses.
    names = {name: i for i, name in enumerate(getattr(model, "output_names", None) or ())}
    fingerprint |= {name: described(compiled.get(name), names) for name in _COMPILED}
    fingerprint["precision"] = _precision(model)
    fingerprint |= {
        name: str(getattr(model, name)) for name in ("steps_per_execution", "run_eagerly", "jit_compile")
    }
    given = flat_callbacks(arguments.get("callbacks"))
    fingerprint["callbacks"] = "\n".join(_text_of(c) for c in given if _decides(c))
    return fingerprint


def other_callbacks(callbacks: Sequence[keras.callbacks.Callback]) -> list[str]:
    """Return the names of callbacks that may be on the chief alone, which decides for all.

    >>> other_callbacks([keras.callbacks.LambdaCallback(), keras.callbacks.EarlyStopping()])
    ['LambdaCallback']
    """
    return [type(c).__name__ for c in callbacks if not _decides(c) and not is_chief_only(c)]


def are_within(callbacks: Sequence[Sequence[str]]) -> bool:
    """Return whether the chief has all callbacks that others have.

    >>> are_within([["Prints", "Times"], ["Times"]]), are_within([["Prints"], ["Times"]])
    (True, False)
    """
    return all(Counter(c) <= Counter(callbacks[0]) for c in callbacks)


def _decides(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback changes on each worker what is trained, or waits for the other workers."""
    if isinstance(callback, FitExtension):
        return True
    is_keras_own = type(callback).__module__.partition(".")[0] == "keras"
    return (
        is_keras_own and not is_chief_only(callback) and type(callback) is not keras.callbacks.LambdaCallback
    )


def _text_of(callback: keras.callbacks.Callback) -> str:
    common = callback.common if isinstance(callback, FitExtension) else ""
    return f"{type(callback).__name__} {common}".strip()


def _precision(model: keras.Model) -> str:
    return str(getattr(getattr(model, "dtype_policy", None), "name", None))


def size_of(data: object) -> str:
    """Return the type of some input, and what is known before the first batch: shapes, or how many."""
    name = getattr(type(data), "described_as", type(data).__name__)
    return f"{name} {' '.join(map(_size_of_leaf, jax.tree.leaves(data)))}"


def _size_of_leaf(leaf: UserValue) -> str:
    if hasattr(leaf, "shape"):
        return str(tuple(leaf.shape))
    try:
        return f"{leaf.num_batches if hasattr(leaf, 'num_batches') else len(leaf)} batches"
    except (TypeError, NotImplementedError):  # from generators and the like
        return "of unknown size"
