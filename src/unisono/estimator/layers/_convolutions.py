"""Convolutions with TensorFlow 1's arguments.

Tests: tests/unit/estimator/test_layers.py.
"""

from __future__ import annotations

import keras

from unisono.estimator.layers._base import GraphLayer, KerasArgument, Sizes, as_function


class _Convolution(GraphLayer):
    """What the convolutions have in common: the order of their arguments."""

    def __init__(
        self,
        filters: int,
        kernel_size: Sizes,
        strides: Sizes = 1,
        padding: str = "valid",
        data_format: str = "channels_last",
        dilation_rate: Sizes = 1,
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
            filters=filters,
            kernel_size=kernel_size,
            strides=strides,
            padding=padding,
            data_format=data_format,
            dilation_rate=dilation_rate,
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


class Conv1D(_Convolution, keras.layers.Conv1D):
    """A convolution over one axis.

    Args:
        filters: the number of output channels.
        kernel_size: the size of the window: a number, or one for each axis.
        strides: how far the window moves: a number, or one for each axis.
        padding: `"valid"` or `"same"`.
        data_format: `"channels_last"` or `"channels_first"`.
        dilation_rate: the distance of the window's elements.
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

    >>> Conv1D(4, 3)(keras.ops.ones((2, 8, 3))).shape
    (2, 6, 4)
    """


class Conv2D(_Convolution, keras.layers.Conv2D):
    """A convolution over two axes.

    Args:
        filters: the number of output channels.
        kernel_size: the size of the window: a number, or one for each axis.
        strides: how far the window moves: a number, or one for each axis.
        padding: `"valid"` or `"same"`.
        data_format: `"channels_last"` or `"channels_first"`.
        dilation_rate: the distance of the window's elements.
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

    >>> Conv2D(4, 3, padding="same")(keras.ops.ones((2, 8, 8, 3))).shape
    (2, 8, 8, 4)
    """


class Conv3D(_Convolution, keras.layers.Conv3D):
    """A convolution over three axes.

    Args:
        filters: the number of output channels.
        kernel_size: the size of the window: a number, or one for each axis.
        strides: how far the window moves: a number, or one for each axis.
        padding: `"valid"` or `"same"`.
        data_format: `"channels_last"` or `"channels_first"`.
        dilation_rate: the distance of the window's elements.
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

    >>> Conv3D(4, 3)(keras.ops.ones((2, 4, 4, 4, 3))).shape
    (2, 2, 2, 2, 4)
    """


conv1d, conv2d, conv3d = (
    as_function(Conv1D, "conv1d"),
    as_function(Conv2D, "conv2d"),
    as_function(Conv3D, "conv3d"),
)
