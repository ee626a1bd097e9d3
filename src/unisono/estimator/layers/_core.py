"""Normalization and dropout with TensorFlow 1's arguments.

Tests: tests/unit/estimator/test_layers.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import keras

from unisono._errors import UnsupportedError
from unisono._types import PyTree
from unisono.estimator.layers._base import (
    REUSED,
    TEXTS,
    GraphLayer,
    KerasArgument,
    texts_of,
)
from unisono.estimator.layers._scopes import found_or_made

_OUTPUTS = "The outputs of the layer, a float array of the shape of `inputs`."

_DROPOUT = TEXTS.with_texts(
    rate="number from 0 to 1; the share of elements that become 0.",
    noise_shape="shape of the random numbers, in which an axis of size 1 stands for equal ones; None for the "
    "shape of the inputs.",
    seed="whole number for the random numbers; None for a random one.",
)

_NORMALIZATION = TEXTS.with_texts(
    texts_of("beta", "gamma", "moving_mean", "moving_variance"),
    axis="whole number, or a list of one; the axis of channels.",
    momentum="number from 0 to 1; how much of the moving statistics a batch keeps.",
    epsilon="number; added to the variance.",
    center="bool; whether a variable `beta` is added.",
    scale="bool; whether there is a factor, a variable `gamma`.",
    renorm="must be False.",
    renorm_clipping="any value; has no effect.",
    renorm_momentum="number; has no effect.",
    fused="bool or None; has no effect, as the compiler decides.",
    trainable="bool; whether optimizers change `beta` and `gamma`.",
    virtual_batch_size="must be None.",
    adjustment="must be None.",
)

#: The names of `__init__` that the Keras layer does not take; `trainable` is about two variables alone.
_NOT_OF_KERAS = {
    "renorm", "renorm_clipping", "renorm_momentum", "fused", "trainable", "virtual_batch_size", "adjustment",
    "self", "__class__",
}  # fmt: skip


@_DROPOUT
class Dropout(GraphLayer, keras.layers.Dropout):
    """Zeros at random, where it is called with `training=True`; other elements grow accordingly.

    >>> Dropout(0.5)(keras.ops.ones(3)).tolist()
    [1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        rate: float = 0.5,
        noise_shape: Sequence[int | None] | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(rate=rate, noise_shape=noise_shape, seed=seed, name=name)


@_NORMALIZATION.with_texts(raises={"UnsupportedError": "an argument has another value than it must have."})
class BatchNormalization(GraphLayer, keras.layers.BatchNormalization):
    """Inputs less their mean, by their deviation: of the batch with `training=True`, else of batches so far.

    What TensorFlow 1 collects in `UPDATE_OPS` needs no care: a step updates the moving statistics.

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
        renorm_clipping: object = None,
        renorm_momentum: float = 0.99,
        fused: bool | None = None,
        trainable: bool = True,
        virtual_batch_size: int | None = None,
        adjustment: object = None,
        name: str | None = None,
    ) -> None:
        _check_absent(renorm=renorm, virtual_batch_size=virtual_batch_size, adjustment=adjustment)
        options = {k: v for k, v in locals().items() if k not in _NOT_OF_KERAS}
        if isinstance(axis, (list, tuple)) and len(axis) == 1:
            options["axis"] = axis[0]
        super().__init__(**options)
        self._trains_scale = trainable

    def build(self, input_shape: tuple[int | None, ...] | None) -> None:
        """Make the variables.

        Args:
            input_shape: tuple of whole numbers; the shape of inputs.
        """
        super().build(input_shape)
        # Not `trainable=False` of the layer, with which Keras uses the moving statistics in training, too.
        for variable in (self.beta, self.gamma) if not self._trains_scale else ():
            if variable is not None:
                variable.trainable = False


def _check_absent(**given: object) -> None:
    for name, value in given.items():
        if value:
            raise UnsupportedError(
                f"`{name}` has no counterpart in Keras' BatchNormalization. Received: {value!r}. Leave it "
                "out; `keras.layers.BatchNormalization(synchronized=True)` sees all replicas."
            )


@_DROPOUT.with_texts(
    inputs="float array of any shape.",
    training="bool, such as `mode == ModeKeys.TRAIN`; whether elements become 0.",
    returns=_OUTPUTS,
    raises={"UnsupportedError": "`training` is a tensor."},
)
def dropout(
    inputs: PyTree,
    rate: float = 0.5,
    noise_shape: Sequence[int | None] | None = None,
    seed: int | None = None,
    training: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Return inputs with zeros at random, if `training`.

    >>> dropout(keras.ops.ones(3), training=False).tolist()
    [1.0, 1.0, 1.0]
    """
    layer = found_or_made("dropout", Dropout, name, None, lambda n: Dropout(rate, noise_shape, seed, n))
    result: jax.Array = layer(inputs, training=_known(training))
    return result


@_NORMALIZATION.with_texts(
    inputs="float array of any shape.",
    args="arguments of `BatchNormalization` in its order.",
    training="bool; whether the batch is normalized by its own statistics, which change the moving ones.",
    kwargs="arguments of `BatchNormalization` by their names.",
    returns=_OUTPUTS,
    raises={
        **REUSED,
        "UnsupportedError": "`training` is a tensor, or an argument has another value than it must have.",
    },
)
def batch_normalization(
    inputs: PyTree, *args: Any, training: bool = False, reuse: bool | str | None = None, **kwargs: Any
) -> jax.Array:
    """Normalize inputs by a new `BatchNormalization`.

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
