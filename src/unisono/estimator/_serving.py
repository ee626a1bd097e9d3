"""Models of an Estimator for others to run: serving inputs, export outputs, and the artefact.

Source: https://github.com/tensorflow/estimator (tensorflow_estimator/python/estimator/export)
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from unisono._export._specs import ArraySpec
from unisono._system._object_store import given_place
from unisono._types import PyTree, UserValue
from unisono.estimator._spec import EstimatorSpec, ModeKeys
from unisono.estimator._train_op import ModelCall, entered_call
from unisono.estimator.session._evaluate import DataPass, PassTask
from unisono.estimator.session._model_step import ModelFunction, ModelVariables
from unisono.export import export

#: The signature that is exported.
DEFAULT = "serving_default"


@dataclasses.dataclass(frozen=True)
class PredictOutput:
    """An exported output of named arrays.

    Args:
        outputs: arrays by name, or one array.

    >>> PredictOutput({"logits": [0.2]}).outputs
    {'logits': [0.2]}
    """

    outputs: PyTree

    def _arrays(self) -> dict[str, Any]:
        """Return the arrays by name."""
        return dict(self.outputs) if isinstance(self.outputs, Mapping) else {"output": self.outputs}


@dataclasses.dataclass(frozen=True)
class ClassificationOutput:
    """An exported output of scores, or classes, or both.

    Args:
        scores: array, or None.
        classes: array, or None.

    >>> ClassificationOutput(scores=[0.2, 0.8]).scores
    [0.2, 0.8]
    """

    scores: Any = None
    classes: Any = None

    def _arrays(self) -> dict[str, Any]:
        """Return the arrays by name."""
        every = {"scores": self.scores, "classes": self.classes}
        return {name: x for name, x in every.items() if x is not None}


@dataclasses.dataclass(frozen=True)
class RegressionOutput:
    """An exported output of one number for each example.

    Args:
        value: array.

    >>> RegressionOutput([0.2]).value
    [0.2]
    """

    value: object

    def _arrays(self) -> dict[str, Any]:
        """Return the array by its name."""
        return {"outputs": self.value}


@dataclasses.dataclass(frozen=True)
class ServingInputReceiver:
    """The inputs of an exported model.

    Args:
        features: for the model_fn: the `receiver_tensors`, or what Keras' operations make of them.
        receiver_tensors: tensors by name: `keras.KerasTensor`s, or anything with a shape and a dtype.
        receiver_tensors_alternatives: accepted for TensorFlow's signature.

    >>> import keras
    >>> age = keras.KerasTensor((None,), "float32")
    >>> sorted(ServingInputReceiver({"age": age}, {"age": age}).receiver_tensors)
    ['age']
    """

    features: PyTree
    receiver_tensors: PyTree
    receiver_tensors_alternatives: UserValue = None


#: TensorFlow's class for features that are one array.
TensorServingInputReceiver = ServingInputReceiver


def build_raw_serving_input_receiver_fn(
    features: PyTree, default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Return a function that gives a `ServingInputReceiver` of arrays.

    Args:
        features: examples or specifications of batches by name, or of one array: arrays, or anything with
            shape and dtype. The first dimension stands for any number of rows.
        default_batch_size: a fixed number of rows; None for any.

    >>> receiver = build_raw_serving_input_receiver_fn({"x": np.zeros((1, 3), "float32")})()
    >>> receiver.features["x"].shape
    (None, 3)
    """

    def receiver_fn() -> ServingInputReceiver:
        tensors = _mapped(
            lambda x: keras.KerasTensor((default_batch_size, *_shape(x)[1:]), _dtype(x)), features
        )
        return ServingInputReceiver(tensors, tensors)

    return receiver_fn


def build_parsing_serving_input_receiver_fn(
    feature_spec: object, default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Raise an error: an artefact takes arrays, and no serialized `tf.Example`s.

    Args:
        feature_spec: of the examples.
        default_batch_size: likewise.

    Raises:
        UnsupportedError: always.

    >>> build_parsing_serving_input_receiver_fn({})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    unisono.UnsupportedError: ...
    """
    raise UnsupportedError(
        "An exported model takes arrays. Received: a feature_spec, by which serialized tf.Examples would be "
        "parsed. Write `build_raw_serving_input_receiver_fn({'x': np.zeros((1, 3), 'float32')})`, and parse "
        "examples before the call."
    )


def _shape(x: UserValue) -> tuple[int | None, ...]:
    return tuple(x.shape)


class _ServingModel(keras.Model):
    """The predictions of a model_fn as a Keras model of its receiver tensors."""

    def __init__(
        self, model_fn: ModelFunction, variables: ModelVariables, receiver: ServingInputReceiver
    ) -> None:
        super().__init__(name="estimator")
        self._model_fn, self._store = model_fn, variables
        self._held = list(variables.used)
        self._features = _features_of(receiver)
        self.built = True

    def call(self, inputs: PyTree) -> dict[str, Any]:
        """Return the arrays of the default signature."""
        call = ModelCall(ModeKeys.PREDICT, None, self._store)
        with self._store.entered(), entered_call(call):
            spec = self._model_fn(self._features(inputs), None, ModeKeys.PREDICT)
        return _outputs_of(spec)


def _features_of(receiver: ServingInputReceiver) -> Callable[[PyTree], PyTree]:
    if not isinstance(receiver, ServingInputReceiver):
        raise InvalidTypeError(
            "A serving_input_receiver_fn must return a ServingInputReceiver. Received: "
            f"{type(receiver).__name__}. Write `ServingInputReceiver(features, receiver_tensors)`."
        )
    tensors, features = receiver.receiver_tensors, receiver.features
    if tensors is features:
        return lambda inputs: inputs
    own = tensors if isinstance(tensors, Mapping) else {"": tensors}
    wanted = features if isinstance(features, Mapping) else {"": features}
    names = {name: next((n for n, t in own.items() if t is x), None) for name, x in wanted.items()}
    if None not in names.values():

        def pick(inputs: PyTree) -> PyTree:
            given = inputs if isinstance(tensors, Mapping) else {"": inputs}
            arrays = {name: given[n] for name, n in names.items()}
            return arrays if isinstance(features, Mapping) else arrays[""]

        return pick
    return keras.Function(inputs=tensors, outputs=features)  # type: ignore[no-any-return]


def _outputs_of(spec: EstimatorSpec) -> dict[str, Any]:
    """Return the arrays of the default signature by name."""
    given = spec.export_outputs
    if given:
        chosen = given.get(DEFAULT, next(iter(given.values())) if len(given) == 1 else None)
        if chosen is None:
            raise InvalidArgumentError(
                "Multiple export_outputs were provided, but none of them is specified as the default. "
                f"Received: {sorted(given)}. Name one of them {DEFAULT!r}."
            )
        arrays: dict[str, Any] = chosen._arrays()
        return arrays
    return PredictOutput(spec.predictions)._arrays()


def export_model(
    task: PassTask, base: str | os.PathLike[str], receiver_fn: Callable[[], ServingInputReceiver]
) -> str:
    """Write the artefact of a checkpoint's predictions, in a new directory."""
    receiver = receiver_fn()
    features = _features_of(receiver)
    specs = _mapped(lambda x: ArraySpec(_any_batch(_shape(x)), _dtype(x)), receiver.receiver_tensors)
    example = _mapped(
        lambda x: np.zeros([1 if n is None else n for n in _shape(x)], _dtype(x)), receiver.receiver_tensors
    )
    made = features(example)
    run = DataPass(task, ModeKeys.PREDICT, lambda *_: iter([(_mapped(np.asarray, made), None)]))
    run.create()
    run.begin([])
    run.variables.is_closed = True
    folder = given_place(base)
    folder.mkdir(parents=True, exist_ok=True)
    number = int(time.time())
    while (folder / str(number)).exists():
        number += 1
    model = _ServingModel(task.model_fn, run.variables, receiver)
    export(model, folder / str(number), "stablehlo", input_spec=specs)
    return str(folder / str(number))


def _mapped(function: Callable[[Any], Any], tree: PyTree) -> PyTree:
    if isinstance(tree, Mapping):
        return {name: function(x) for name, x in tree.items()}
    return function(tree)


def _dtype(x: UserValue) -> str:
    return str(np.dtype(x.dtype) if not isinstance(x.dtype, str) else x.dtype)


def _any_batch(shape: tuple[int | None, ...]) -> tuple[int | str, ...]:
    return tuple(
        "batch" if i == 0 and n is None else n if n is not None else f"d{i}" for i, n in enumerate(shape)
    )
