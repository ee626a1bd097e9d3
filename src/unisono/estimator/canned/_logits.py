"""The models of canned estimators: from features to logits.

Source: https://github.com/tensorflow/estimator (tensorflow_estimator/python/estimator/canned)

Tests: tests/virtual/estimator/test_canned.py.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono.estimator._spec import ModeKeys
from unisono.feature_column._models import DenseFeatures, LinearModel

if TYPE_CHECKING:
    from unisono._system._literals import Combiner
    from unisono.feature_column._column import FeatureColumn

#: Logits, and the variables that training changes.
Logits = tuple[Any, list[keras.Variable]]

#: From features and a mode to logits, and a function that returns the optimizer of their variables.
Part = tuple[Callable[[Mapping[str, jax.Array], str], Logits], Callable[[], Any]]

#: A layer's function of its sums.
Activation = Callable[[Any], Any] | str | None

_OPTIMIZERS = {
    "Adagrad": keras.optimizers.Adagrad,
    "Adam": keras.optimizers.Adam,
    "Ftrl": keras.optimizers.Ftrl,
    "RMSProp": keras.optimizers.RMSprop,
    "SGD": keras.optimizers.SGD,
}


def linear_logits(
    columns: Sequence[FeatureColumn],
    units: int,
    sparse_combiner: Combiner,
    features: Mapping[str, jax.Array],
    mode: str,
) -> Logits:
    """Return the logits of a linear model."""
    with keras.name_scope("linear"):
        model = LinearModel(columns, units, sparse_combiner, name="linear_model")
        return model(features), list(model.trainable_variables)


def dnn_logits(
    columns: Sequence[FeatureColumn],
    hidden_units: Sequence[int],
    units: int,
    activation_fn: Activation,
    dropout: float | None,
    batch_norm: bool,
    features: Mapping[str, jax.Array],
    mode: str,
) -> Logits:
    """Return the logits of a network."""
    training = mode == ModeKeys.TRAIN
    layers: list[keras.layers.Layer] = []

    def apply(layer: keras.layers.Layer, value: object, **kwargs: Any) -> Any:
        layers.append(layer)
        return layer(value, **kwargs)

    with keras.name_scope("dnn"):
        with keras.name_scope("input_from_feature_columns"):
            net = apply(DenseFeatures(columns, name="input_layer"), features)
        for index, width in enumerate(hidden_units):
            name = f"hiddenlayer_{index}"
            net = apply(keras.layers.Dense(width, activation_fn, name=name), net)
            if dropout is not None and training:
                net = apply(keras.layers.Dropout(dropout), net, training=True)
            if batch_norm:
                with keras.name_scope(name):
                    # TensorFlow's estimators have this momentum.
                    normalization = keras.layers.BatchNormalization(momentum=0.999, name=f"batchnorm_{index}")
                    net = apply(normalization, net, training=training)
        logits = apply(keras.layers.Dense(units, name="logits"), net)
    return logits, [variable for layer in layers for variable in layer.trainable_variables]


class BaselineLogits(keras.layers.Layer):
    """Logits that are the same for all examples."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._units = units

    def build(self, input_shape: tuple[int | None, ...] | None = None) -> None:
        """Create the bias."""
        self.bias = self.add_weight(name="bias", shape=(self._units,), initializer="zeros")

    def call(self, rows: jax.Array) -> jax.Array:
        """Return the bias for each row."""
        bias = jnp.asarray(keras.ops.convert_to_tensor(self.bias))
        return jnp.broadcast_to(bias, (rows.shape[0], self._units))


def optimizer_maker(given: object, learning_rate: float) -> Callable[[], Any]:
    """Return a function that returns an optimizer which no other model has.

    A model_fn is run each time a program is traced, and its variables are found again by their paths: each
    run needs an optimizer that has none yet. What an optimizer is made of is read at once, because a trace
    does not know the value of its learning rate.

    >>> type(optimizer_maker("Adagrad", 0.05)()).__name__
    'Adagrad'
    """
    if isinstance(given, str):
        if given not in _OPTIMIZERS:
            raise InvalidArgumentError(
                f"An optimizer's name must be one of {', '.join(_OPTIMIZERS)}. Received: {given!r}."
            )
        return functools.partial(_OPTIMIZERS[given], learning_rate)
    if isinstance(given, keras.Optimizer):
        return functools.partial(type(given).from_config, given.get_config())
    inner = getattr(given, "optimizer", None)
    if hasattr(given, "minimize") and isinstance(inner, keras.Optimizer):
        return functools.partial(_with_optimizer, given, optimizer_maker(inner, learning_rate))
    if not callable(given):
        raise InvalidTypeError(
            f"An optimizer must be a name, an optimizer, or a function that returns one. Received: {given!r}."
        )
    make: Callable[[], Any] = given
    return make


def _with_optimizer(given: Any, make: Callable[[], keras.Optimizer]) -> Any:
    fresh = copy.copy(given)
    fresh.optimizer = make()
    return fresh
