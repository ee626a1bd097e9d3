"""Dense layers, normalization, dropout and flattening with TensorFlow 1's arguments.

Tests: tests/unit/estimator/test_layers.py.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import keras

from unisono._errors import UnsupportedError
from unisono._types import PyTree, UserValue
from unisono.estimator.layers._base import GraphLayer, KerasArgument, as_function
from unisono.estimator.layers._scopes import found_or_made


class Dense(GraphLayer, keras.layers.Dense):
    """A product with a matrix, over the last axis.

    Args:
        units: the number of outputs.
        activation: a function, or its name in Keras; None for none.
        use_bias: whether to add a bias.
        kernel_initializer: of Keras, as all initializers, regularizers and constraints; None for Glorot's.
        bias_initializer: likewise; None for zeros.
        kernel_regularizer: its loss counts in `tf.losses.get_total_loss`.
        bias_regularizer: likewise.
        activity_regularizer: likewise.
        kernel_constraint: of Keras.
        bias_constraint: of Keras.
        trainable: whether optimizers change its variables.
        name: of the layer.

    >>> Dense(4)(keras.ops.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self,
        units: int,
        activation: KerasArgument = None,
        use_bias: bool = True,
        kernel_initializer: KerasArgument = None,
        bias_initializer: KerasArgument = "zeros",
        kernel_regularizer: KerasArgument = None,
        bias_regularizer: KerasArgument = None,
        activity_regularizer: KerasArgument = None,
        kernel_constraint: KerasArgument = None,
        bias_constraint: KerasArgument = None,
        trainable: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(
            units=units,
            activation=activation,
            use_bias=use_bias,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            kernel_regularizer=kernel_regularizer,
            bias_regularizer=bias_regularizer,
            activity_regularizer=activity_regularizer,
            kernel_constraint=kernel_constraint,
            bias_constraint=bias_constraint,
            trainable=trainable,
            name=name,
        )


class Flatten(GraphLayer, keras.layers.Flatten):
    """All axes but the first as one.

    Args:
        data_format: `"channels_last"` or `"channels_first"`.
        name: of the layer.

    >>> Flatten()(keras.ops.ones((2, 3, 4))).shape
    (2, 12)
    """

    def __init__(self, data_format: str = "channels_last", name: str | None = None) -> None:
        super().__init__(data_format=data_format, name=name)


class Dropout(GraphLayer, keras.layers.Dropout):
    """Zeros at random, where it is called with `training=True`; other elements grow accordingly.

    Args:
        rate: the share of zeros.
        noise_shape: the shape of the random numbers; None for that of the inputs.
        seed: of the random numbers.
        name: of the layer.

    >>> Dropout(0.5)(keras.ops.ones(3)).tolist()
    [1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        rate: float = 0.5,
        noise_shape: Any = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(rate=rate, noise_shape=noise_shape, seed=seed, name=name)


class BatchNormalization(GraphLayer, keras.layers.BatchNormalization):
    """Inputs less their mean, by their deviation: of the batch with `training=True`, else of batches so far.

    What TensorFlow 1 collects in `UPDATE_OPS` needs no care: a step updates the moving statistics.

    Args:
        axis: that of the channels.
        momentum: how slowly the moving statistics change.
        epsilon: added to the variance.
        center: whether to add a trained `beta`.
        scale: whether to multiply by a trained `gamma`.
        beta_initializer: of Keras, as all initializers, regularizers and constraints.
        gamma_initializer: likewise.
        moving_mean_initializer: likewise.
        moving_variance_initializer: likewise.
        beta_regularizer: its loss counts in `tf.losses.get_total_loss`.
        gamma_regularizer: likewise.
        beta_constraint: likewise.
        gamma_constraint: likewise.
        renorm: must be False.
        renorm_clipping: is not used.
        renorm_momentum: is not used.
        fused: is not used: the compiler decides.
        trainable: whether optimizers change `beta` and `gamma`.
        virtual_batch_size: must be None.
        adjustment: must be None.
        name: of the layer.

    Raises:
        UnsupportedError: an argument has a value that it must not have.

    >>> BatchNormalization()(keras.ops.ones((2, 3))).shape
    (2, 3)
    """

    def __init__(
        self,
        axis: int | list[int] = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        beta_initializer: KerasArgument = "zeros",
        gamma_initializer: KerasArgument = "ones",
        moving_mean_initializer: KerasArgument = "zeros",
        moving_variance_initializer: KerasArgument = "ones",
        beta_regularizer: KerasArgument = None,
        gamma_regularizer: KerasArgument = None,
        beta_constraint: KerasArgument = None,
        gamma_constraint: KerasArgument = None,
        renorm: bool = False,
        renorm_clipping: UserValue = None,
        renorm_momentum: float = 0.99,
        fused: bool | None = None,
        trainable: bool = True,
        virtual_batch_size: int | None = None,
        adjustment: UserValue = None,
        name: str | None = None,
    ) -> None:
        _check_absent(renorm=renorm, virtual_batch_size=virtual_batch_size, adjustment=adjustment)
        super().__init__(
            axis=axis[0] if isinstance(axis, (list, tuple)) and len(axis) == 1 else axis,
            momentum=momentum,
            epsilon=epsilon,
            center=center,
            scale=scale,
            beta_initializer=beta_initializer,
            gamma_initializer=gamma_initializer,
            moving_mean_initializer=moving_mean_initializer,
            moving_variance_initializer=moving_variance_initializer,
            beta_regularizer=beta_regularizer,
            gamma_regularizer=gamma_regularizer,
            beta_constraint=beta_constraint,
            gamma_constraint=gamma_constraint,
            name=name,
        )
        self._trains_scale = trainable

    def build(self, input_shape: Any) -> None:
        """Make the variables."""
        super().build(input_shape)
        # Not `trainable=False` of the layer, with which Keras uses the moving statistics in training, too.
        for variable in (self.beta, self.gamma) if not self._trains_scale else ():
            if variable is not None:
                variable.trainable = False


def _check_absent(**given: UserValue) -> None:
    for name, value in given.items():
        if value:
            raise UnsupportedError(
                f"`{name}` has no counterpart in Keras' BatchNormalization. Received: {value!r}. Leave it "
                "out; `keras.layers.BatchNormalization(synchronized=True)` takes those of all replicas."
            )


dense = as_function(Dense, "dense")
flatten = as_function(Flatten, "flatten")


def dropout(
    inputs: PyTree,
    rate: float = 0.5,
    noise_shape: Any = None,
    seed: int | None = None,
    training: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Return inputs with zeros at random, if `training`.

    Args:
        inputs: array.
        rate: the share of zeros.
        noise_shape: the shape of the random numbers; None for that of the inputs.
        seed: of the random numbers.
        training: whether it is done; True or False, such as `mode == ModeKeys.TRAIN`.
        name: of the layer.

    >>> dropout(keras.ops.ones(3), training=False).tolist()
    [1.0, 1.0, 1.0]
    """
    layer = found_or_made("dropout", Dropout, name, None, lambda n: Dropout(rate, noise_shape, seed, n))
    result: jax.Array = layer(inputs, training=_known(training))
    return result


def batch_normalization(
    inputs: PyTree, *args: Any, training: bool = False, reuse: Any = None, **kwargs: Any
) -> jax.Array:
    """Return what `BatchNormalization` computes.

    Args:
        inputs: array.
        args: those of `BatchNormalization`.
        training: whether the statistics of the batch count, and change the moving ones; True or False.
        reuse: whether the layer of this name is meant that an earlier call made.
        kwargs: as `args`.

    >>> batch_normalization(keras.ops.ones((2, 3)), training=True).tolist()[0]
    [0.0, 0.0, 0.0]
    """
    given = dict(inspect.signature(BatchNormalization).bind(*args, **kwargs).arguments)
    name = given.pop("name", None)
    layer = found_or_made(
        "batch_normalization",
        BatchNormalization,
        name,
        reuse,
        lambda name: BatchNormalization(**given, name=name),
    )
    result: jax.Array = layer(inputs, training=_known(training))
    return result


def _known(training: Any) -> bool:
    """Return whether it is training; a tensor would have to be known when the step is traced."""
    if isinstance(training, jax.core.Tracer):
        raise UnsupportedError(
            "`training` must be True or False when a step is traced. Received: a tensor. Write "
            "`training=mode == tf.estimator.ModeKeys.TRAIN`."
        )
    return bool(training)
