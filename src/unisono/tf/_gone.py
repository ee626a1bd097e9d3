"""Methods of TensorFlow that are gone, with what to write instead: for errors, and for `unisono migrate`."""

from __future__ import annotations

from typing import Any, NoReturn

from unisono._names import missing_name
from unisono._system._replacements import Replacement, missing

#: Methods that Keras 3 does not have, by names that nothing else has.
METHODS = {
    "fit_generator": "is gone in Keras 3. Write: `fit`.",
    "evaluate_generator": "is gone in Keras 3. Write: `evaluate`.",
    "predict_generator": "is gone in Keras 3. Write: `predict`.",
    "predict_classes": "is gone in Keras 3. Write: `predict(x).argmax(-1)`.",
    "predict_proba": "is gone in Keras 3. Write: `predict`.",
    "pretty_printed_concrete_signatures": "belongs to graphs. Write: `jax.make_jaxpr(f)(*args)`.",
    "as_graph_def": "belongs to graphs. Write: `jax.make_jaxpr(f)(*args)`.",
    "to_yaml": "is gone in Keras 3. Write: `to_json`.",
}

#: Arguments of `fit`, `evaluate` and `predict` that Keras 3 does not have.
ARGUMENTS = ("max_queue_size", "use_multiprocessing", "workers")
ARGUMENTS_TEXT = "is gone in Keras 3. Leave it out, or give it to a `keras.utils.PyDataset`."

#: Those of Keras' models, and of `tf.function`s.
OF_MODELS = (
    "evaluate_generator", "fit_generator", "predict_classes", "predict_generator", "predict_proba", "to_yaml",
)  # fmt: skip
OF_FUNCTIONS = ("pretty_printed_concrete_signatures",)


class RemovedName:
    """An attribute that raises an error which says what to write; one that a program sets comes first."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> NoReturn:
        raise missing_name(f"`{owner.__name__}.{self._name}` {METHODS[self._name]}", self._name)


def errors_of(kind: Any, names: tuple[str, ...]) -> list[Replacement]:
    """Return what lets a class raise errors for what it does not have."""
    return [(kind, name, missing(RemovedName(name))) for name in names]
