"""`model_to_estimator`: a compiled Keras model as an Estimator.

Source: https://www.tensorflow.org/versions/r1.15/api_docs/python/tf/keras/estimator/model_to_estimator
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import keras

from unisono._errors import InvalidArgumentError
from unisono._types import PyTree
from unisono.estimator._estimator import Estimator
from unisono.estimator._run_config import RunConfig
from unisono.estimator._spec import EstimatorSpec, ModeKeys
from unisono.estimator._train_op import minimize
from unisono.estimator.session._model_step import ModelVariables
from unisono.step._keras_internals import compiled_metrics


def model_to_estimator(
    keras_model: keras.Model | None = None,
    keras_model_path: str | os.PathLike[str] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    model_dir: str | os.PathLike[str] | None = None,
    config: RunConfig | None = None,
    checkpoint_format: str = "checkpoint",
    metric_names_map: Mapping[str, str] | None = None,
    export_outputs: object = None,
) -> Estimator:
    """Return an Estimator that trains what a compiled Keras model describes, from its weights on.

    Args:
        keras_model: a compiled and built Keras model that can be made from its configuration.
        keras_model_path: path of a saved model, in place of `keras_model`.
        custom_objects: the user's own classes, to load it.
        model_dir: as for `Estimator`.
        config: as for `Estimator`.
        checkpoint_format: accepted for TensorFlow's signature.
        metric_names_map: new names of metrics by their own.
        export_outputs: accepted likewise: predictions are exported by the names of the model's outputs.

    Raises:
        InvalidArgumentError: for none or both of the model and its path, or a model that is not compiled.

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> model_to_estimator(model).latest_checkpoint() is None
    True
    """
    if (keras_model is None) == (keras_model_path is None):
        raise InvalidArgumentError(
            "Either `keras_model` or `keras_model_path` needs to be provided. Received: "
            f"keras_model={keras_model!r}, keras_model_path={keras_model_path!r}."
        )
    source = keras_model
    if source is None:
        source = keras.models.load_model(keras_model_path, custom_objects=custom_objects)
    if not source.compiled or not source.built:
        raise InvalidArgumentError(
            f"The given keras model {source.name!r} has not been compiled yet, or not been built. Received: "
            f"compiled={source.compiled}, built={source.built}. Call `compile`, and name the input's shape."
        )
    description = _ModelDescription(source, dict(metric_names_map or {}))
    return Estimator(description.model_fn, model_dir, config, warm_start_from=description.copy_weights)


class _ModelDescription:
    """A Keras model as a model_fn."""

    def __init__(self, source: keras.Model, names: dict[str, str]) -> None:
        self._class, self._config = type(source), source.get_config()
        self._compiled = source.get_compile_config()
        self._weights = [keras.ops.convert_to_numpy(v) for v in source.variables]
        self._names = names
        self._made: keras.Model | None = None

    def model_fn(self, features: PyTree, labels: PyTree, mode: str) -> EstimatorSpec:
        """Make the model anew, and compute with it."""
        # Keras takes the configuration of a functional model apart (3.15.1).
        model = self._made = self._class.from_config(copy.deepcopy(self._config))
        features = _inputs(model, features)
        outputs = model(features, training=mode == ModeKeys.TRAIN)
        predictions = self._named(model, outputs)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions=predictions)
        model.compile_from_config(copy.deepcopy(self._compiled))
        loss = model.compute_loss(features, labels, outputs, training=mode == ModeKeys.TRAIN)
        model.compute_metrics(features, labels, outputs)
        metrics = {self._names.get(m.name, m.name): m for m in compiled_metrics(model)}
        if mode == ModeKeys.EVAL:
            return EstimatorSpec(mode, predictions, loss, eval_metric_ops=metrics)
        return EstimatorSpec(mode, predictions, loss, minimize(model.optimizer, loss))

    def _named(self, model: keras.Model, outputs: PyTree) -> dict[str, Any]:
        if isinstance(outputs, Mapping):
            return dict(outputs)
        last = model.layers[-1].name if isinstance(model, keras.Sequential) else "output"
        names = list(getattr(model, "output_names", [last]))
        every = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        return dict(zip(names, every, strict=True))

    def copy_weights(self, variables: ModelVariables) -> None:
        """Give the variables the values of the source model."""
        made = [] if self._made is None else self._made.variables
        for variable, value in zip(made, self._weights, strict=True):
            variable.assign(value)


def _inputs(model: keras.Model, features: PyTree) -> PyTree:
    """Return features as a model takes them: one in a dict, whose key was a layer's name, by itself."""
    is_one = isinstance(features, Mapping) and len(features) == 1 and len(model.inputs or ()) == 1
    named = is_one and isinstance(getattr(model, "input", None), Mapping)
    return next(iter(features.values())) if is_one and not named else features
