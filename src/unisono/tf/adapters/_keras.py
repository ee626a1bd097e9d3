"""Keras' old spellings, over Keras 3.

Tests: tests/unit/tf/test_keras.py.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from unisono._system._replacements import Replacement, given, missing, put, where_defined
from unisono._types import PyTree
from unisono.data._pipeline._structure import TensorSpec
from unisono.estimator.train._optimizers import Optimizer
from unisono.spi import hold_by_default, wrap_keras
from unisono.step._keras_internals import takes_training
from unisono.strategies._base import Strategy
from unisono.tf._gone import OF_MODELS, errors_of
from unisono.tf.adapters._saving import save_to_directory, weights_file
from unisono.tf.adapters._spellings import (
    Reference,
    Shape,
    Submodules,
    as_layers,
    as_size,
    check_shape,
    taking_dtype,
    taking_first,
    taking_lists,
    taking_lr,
    taking_name,
    taking_self,
    with_name,
)
from unisono.tf.adapters.models import _keras_2
from unisono.training._host_layers import call_on_host

_log = logging.getLogger("unisono")


def add_methods() -> None:
    """Give Keras' objects the names that TensorFlow 2 had for what they do."""
    # Without a strategy, too: `fit` takes Unisono's datasets.
    wrap_keras()
    put(__name__, [*_of_models(), *_of_layers(), *_of_optimizers(), *_of_tensors()])


def _of_models() -> list[Replacement]:
    model: Any = keras.Model
    inputs = keras.Input((1,), name="strings")
    functional = type(keras.Model(inputs, inputs, name="strings"))
    return [
        *errors_of(model, OF_MODELS),
        *_keras_2.replacements(),
        (model, "save_spec", given(save_spec)),
        # Keras asks whether a model's class has another one than where it is defined.
        where_defined(model, "compile", _taking_distribute),
        (model, "save", _to_any_path),
        (model, "save_weights", _with_ending),
        (model, "load_weights", _with_ending),
        (model, "compute_loss", _matching_ranks),
        (model, "compute_metrics", _matching_ranks),
        where_defined(model, "get_metrics_result", _of_values),
        (keras.metrics.Metric, "reset_states", missing(lambda self: self.reset_state())),
        # Keras would make arrays of JAX of the strings that preprocessing layers take.
        *((kind, "__call__", given(_call_with_strings)) for kind in (functional, keras.Sequential)),
        where_defined(keras.Sequential, "__init__", taking_first(as_layers)),
    ]


def _of_layers() -> list[Replacement]:
    cells = ("GRUCell", "LSTMCell", "SimpleRNNCell", "StackedRNNCells")
    return [
        (keras.Layer, "submodules", given(Submodules())),
        where_defined(keras.Layer, "__call__", taking_lists),
        where_defined(keras.Layer, "__init__", taking_self),
        where_defined(keras.Layer, "add_weight", taking_name),
        where_defined(keras.layers.Dense, "__init__", taking_first(as_size)),
        *(where_defined(getattr(keras.layers, c), "get_initial_state", taking_dtype) for c in cells),
    ]


def _of_optimizers() -> list[Replacement]:
    kind: Any = keras.optimizers.Optimizer
    rate = property(
        lambda self: self.learning_rate,
        lambda self, value: setattr(self, "learning_rate", value),
        doc="The learning rate.",
    )
    return [
        (kind, "lr", missing(rate)),
        # Estimators of TensorFlow 2: `optimizer.iterations = tf.compat.v1.train.get_global_step()`.
        where_defined(
            kind,
            "iterations",
            lambda own: own.setter(lambda self, value: setattr(self, "_iterations", value)),
        ),
        where_defined(kind, "__init__", taking_lr),
    ]


def _of_tensors() -> list[Replacement]:
    # JAX makes the arrays: a subclass is not possible.
    kinds = (jax.Array, jax.core.Tracer, keras.KerasTensor, keras.Variable)
    methods: dict[str, Callable[..., Any]] = {
        "get_shape": lambda self: Shape(self.shape),
        "ref": lambda self: Reference(self),  # noqa: PLW0108 (a method)
        "set_shape": check_shape,
    }
    types = {
        keras.Variable: ["dtype"],
        keras.KerasTensor: ["dtype"],
        keras.Layer: ["dtype", "compute_dtype", "variable_dtype"],
    }
    return [
        *((kind, name, given(method)) for kind in kinds for name, method in methods.items()),
        *(where_defined(kind, name, with_name) for kind, names in types.items() for name in names),
    ]


def _taking_distribute(compile_model: Callable[..., None]) -> Callable[..., None]:
    """Return `Model.compile` with the argument `distribute` of TensorFlow 1: a strategy."""

    @functools.wraps(compile_model)
    def compiled(
        self: keras.Model, *args: object, distribute: Strategy | None = None, **kwargs: object
    ) -> None:
        args, kwargs = _as_keras_3(args, kwargs)
        if distribute is not None:
            with distribute.scope():
                _make_again(self)
                # Not `compile_model`: what wraps this method by now is to see the scope, too.
                self.compile(*map(_again, args), **{name: _again(value) for name, value in kwargs.items()})
            return
        compile_model(self, *args, **kwargs)
        hold_by_default(self)

    return compiled


def _matching_ranks(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compute_loss` or `compute_metrics` with the ranks of Keras 2's `compile`.

    There, numbers `y` of shape (n,) are a column beside predictions of shape (n, k).
    """

    @functools.wraps(method)
    def matching(
        self: keras.Model, x: Any = None, y: Any = None, y_pred: Any = None, *args: object, **kwargs: object
    ) -> Any:
        return method(self, x, _as_columns(y, y_pred), y_pred, *args, **kwargs)

    return matching


def _of_values(results: Callable[..., Any]) -> Callable[..., Any]:
    """Return `get_metrics_result` for metrics whose `result` returns a variable."""

    @functools.wraps(results)
    def found(self: keras.Model) -> Any:
        return {k: v.value if isinstance(v, keras.Variable) else v for k, v in results(self).items()}

    return found


def _as_columns(y: Any, y_pred: Any) -> Any:
    structure: Any = jax.tree.structure(y)
    if structure != jax.tree.structure(y_pred):
        return y
    return jax.tree.map(lambda a, p: a[:, None] if _is_column(a, p) else a, y, y_pred)


def _is_column(y: Any, y_pred: Any) -> bool:
    # A single column is Keras 3's own business, and classes as integers are those of sparse losses.
    ranks = (getattr(y, "ndim", None), getattr(y_pred, "ndim", None))
    return ranks == (1, 2) and y_pred.shape[-1] > 1 and keras.backend.is_float_dtype(str(y.dtype))


def save_spec(model: keras.Model, dynamic_batch: bool = True) -> Any:
    """Return the shapes and types of a model's inputs, as arguments and named arguments; None if unbuilt."""
    inputs = getattr(model, "input", None)
    if inputs is None:
        # A Sequential model that has not been called says no more.
        (inputs,) = getattr(model, "inputs", None) or (None,)
    if inputs is None:
        return None

    def spec(tensor: Any) -> TensorSpec:
        rows = None if dynamic_batch else tensor.shape[0]
        return TensorSpec((rows, *tensor.shape[1:]), str(tensor.dtype))

    return (keras.tree.map_structure(spec, inputs),), {}


def _as_keras_3(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `compile` with optimizers of Keras, and metrics by name.

    They are the third argument in Keras 2; in Keras 3 it is the weights of losses, which are numbers.
    """
    if len(args) > 2 and any(isinstance(m, str) or callable(m) for m in keras.tree.flatten(args[2])):
        kwargs = {**dict(zip(("metrics", "loss_weights"), args[2:], strict=False)), **kwargs}
        args = args[:2]
    return tuple(map(_plain, args)), {name: _plain(value) for name, value in kwargs.items()}


def _plain(argument: Any) -> Any:
    """Return the Keras optimizer of one of TensorFlow 1; others as they are."""
    return argument.optimizer if isinstance(argument, Optimizer) else argument


def _to_any_path(save: Callable[..., None]) -> Callable[..., None]:
    """Return `Model.save` that writes a directory where the path has no ending of Keras 3."""

    @functools.wraps(save)
    def saved(
        self: keras.Model,
        filepath: Any,
        overwrite: bool = True,
        zipped: bool | None = None,
        options: object = None,
        **kwargs: object,
    ) -> None:
        if not save_to_directory(self, filepath):
            save(self, filepath, overwrite, zipped, **kwargs)

    return saved


def _with_ending(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that reads or writes weights at paths as TensorFlow 2 has them."""

    @functools.wraps(method)
    def with_ending(self: keras.Model, filepath: Any, *args: object, **kwargs: object) -> Any:
        # The ending of the path says the format.
        kwargs = {name: value for name, value in kwargs.items() if name not in ("save_format", "options")}
        if method.__name__ == "save_weights" and not self.built:
            # Keras 3 raises an error; in TensorFlow 2 programs go on.
            _log.warning(
                "%s has no weights yet: `save_weights` wrote no file. Call the model before.", self.name
            )
            return None
        method(self, weights_file(filepath), *args, **kwargs)
        return LoadStatus()

    return with_ending


class LoadStatus:
    """What `load_weights` returns: Keras has checked the weights already, and raised an error."""

    def assert_consumed(self) -> LoadStatus:
        """Return the object itself."""
        return self

    assert_existing_objects_matched = expect_partial = assert_nontrivial_match = assert_consumed


def _is_text(value: object) -> bool:
    # Also a column of pandas.
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    return isinstance(value, (str, bytes)) or kind in ("U", "S", "O")


def _call_of_any_size(self: Any, *args: object, **kwargs: object) -> Any:
    """Call a sequential model; one of preprocessing layers alone stays unbuilt.

    Keras 3 builds a model for the shape of the first call, Keras 2 for those of all. Images have many shapes.
    """
    module = keras.layers.Rescaling.__module__.rpartition(".")[0]
    if hasattr(self, "inputs") or not all(type(one).__module__.startswith(module) for one in self.layers):
        return keras.Model.__call__(self, *args, **kwargs)
    value, training, *_ = (*args, kwargs.get("training"))
    for one in self.layers:
        value = one(value, training=training) if takes_training(one) else one(value)
    return value


def _call_with_strings(self: Any, *args: object, **kwargs: object) -> Any:
    given = args[0] if args else kwargs.get("inputs")
    if not any(_is_text(leaf) for leaf in keras.tree.flatten(given)):
        if isinstance(self, keras.Sequential) and not isinstance(given, keras.KerasTensor):
            return _call_of_any_size(self, *args, **kwargs)
        return keras.Model.__call__(self, *args, **kwargs)
    return call_on_host(self, given)


def _make_again(model: keras.Model) -> None:
    """Let a model hold variables of the current scope, with the values that it had.

    A model of another strategy, or of none, cannot be moved there: it takes over what a clone holds. Its
    layers are those of the clone afterwards, as TensorFlow 1 trained clones, too.
    """
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    # Keras wraps these two for each object.
    own = {name: vars(model)[name] for name in ("build", "quantize") if name in vars(model)}
    vars(model).clear()
    vars(model).update({**vars(clone), **own})


def _again(argument: Any) -> Any:
    """Return an optimizer made in the current scope, where its variables belong; others as they are."""
    if isinstance(argument, keras.optimizers.Optimizer):
        return type(argument).from_config(argument.get_config())
    return argument


def input_of(shape: Any = None, *args: object, **kwargs: object) -> Any:
    """Return `keras.Input`, whose shape may be a number."""
    return keras.Input((shape,) if isinstance(shape, int) else shape, *args, **kwargs)


class KerasReduction:
    """The names of a loss's reductions."""

    AUTO = "sum_over_batch_size"
    NONE = None
    SUM = "sum"
    SUM_OVER_BATCH_SIZE = "sum_over_batch_size"


class SaveOptions:
    """Options of saving, which have no meaning here."""

    def __init__(self, **options: object) -> None:
        self.options = options


def get_value(x: PyTree) -> np.ndarray:
    """Return a variable's or tensor's numbers.

    >>> float(get_value(2.5))
    2.5
    """
    return np.asarray(keras.ops.convert_to_numpy(x))


def set_value(x: keras.Variable, value: PyTree) -> None:
    """Set a variable."""
    x.assign(value)


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras' callback, for paths as TensorFlow 2 has them.

    Keras 3 demands `.weights.h5` or `.keras` at the end of the path; it is added.
    """

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        *args: object,
        **kwargs: object,
    ) -> None:
        path = os.fspath(filepath)
        end = ".weights.h5" if save_weights_only else ".keras"
        if not path.endswith((end, ".h5")):
            path += end
        super().__init__(path, monitor, verbose, save_best_only, save_weights_only, *args, **kwargs)


def SyncBatchNormalization(**kwargs: object) -> keras.layers.BatchNormalization:  # noqa: N802 (TensorFlow's name)
    """Return a `BatchNormalization` whose statistics are those of all replicas."""
    layer = keras.layers.BatchNormalization(**kwargs)
    # Not in the constructor: outside of a strategy Keras rejects it on JAX.
    layer.synchronized = True
    return layer
