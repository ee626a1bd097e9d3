"""Convolutions in two steps, and transposes, with TensorFlow 1's arguments.

Tests: tests/unit/estimator/test_layers.py.
"""

from __future__ import annotations

import keras

from unisono.estimator.layers._base import GraphLayer, KerasArgument, Sizes, as_function


class _Transpose(GraphLayer):
    """What the transposes have in common: the order of their arguments."""

    def __init__(
        self,
        filters: int,
        kernel_size: Sizes,
        strides: Sizes = 1,
        padding: str = "valid",
        data_format: str = "channels_last",
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


class Conv2DTranspose(_Transpose, keras.layers.Conv2DTranspose):
    """The transpose of a convolution over two axes.

    Args:
        filters: the number of output channels.
        kernel_size: the size of the window: a number, or one for each axis.
        strides: how far the window moves: a number, or one for each axis.
        padding: `"valid"` or `"same"`.
        data_format: `"channels_last"` or `"channels_first"`.
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

    >>> Conv2DTranspose(4, 2, strides=2)(keras.ops.ones((2, 4, 4, 3))).shape
    (2, 8, 8, 4)
    """


class Conv3DTranspose(_Transpose, keras.layers.Conv3DTranspose):
    """The transpose of a convolution over three axes.

    Args:
        filters: the number of output channels.
        kernel_size: the size of the window: a number, or one for each axis.
        strides: how far the window moves: a number, or one for each axis.
        padding: `"valid"` or `"same"`.
        data_format: `"channels_last"` or `"channels_first"`.
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

    >>> Conv3DTranspose(4, 2, strides=2)(keras.ops.ones((2, 2, 2, 2, 3))).shape
    (2, 4, 4, 4, 4)
    """


class _Separable(GraphLayer):
    """What the convolutions in two steps have in common: the order of their arguments."""

    def __init__(
        self,
        filters: int,
        kernel_size: Sizes,
        strides: Sizes = 1,
        padding: str = "valid",
        data_format: str = "channels_last",
        dilation_rate: Sizes = 1,
        depth_multiplier: int = 1,
        activation: KerasArgument = None,
        use_bias: bool = True,
        depthwise_initializer: KerasArgument = None,
        pointwise_initializer: KerasArgument = None,
        bias_initializer: KerasArgument = "zeros",
        depthwise_regularizer: KerasArgument = None,
        pointwise_regularizer: KerasArgument = None,
        bias_regularizer: KerasArgument = None,
        activity_regularizer: KerasArgument = None,
        depthwise_constraint: KerasArgument = None,
        pointwise_constraint: KerasArgument = None,
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
            depth_multiplier=depth_multiplier,
            activation=activation,
            use_bias=use_bias,
            depthwise_initializer=depthwise_initializer,
            pointwise_initializer=pointwise_initializer,
            bias_initializer=bias_initializer,
            depthwise_regularizer=depthwise_regularizer,
            pointwise_regularizer=pointwise_regularizer,
            bias_regularizer=bias_regularizer,
            activity_regularizer=activity_regularizer,
            depthwise_constraint=depthwise_constraint,
            pointwise_constraint=pointwise_constraint,
            bias_constraint=bias_constraint,
            trainable=trainable,
            name=name,
        )


class SeparableConv1D(_Separable, keras.layers.SeparableConv1D):
    """A convolution of each channel by itself over one axis, then one over channels.

    Args:
        filters: the number of output channels.
        kernel_size: the size of the window: a number, or one for each axis.
        strides: how far the window moves: a number, or one for each axis.
        padding: `"valid"` or `"same"`.
        data_format: `"channels_last"` or `"channels_first"`.
        dilation_rate: the distance of the window's elements.
        depth_multiplier: how many channels the first step makes of each.
        activation: a function, or its name in Keras; None for none.
        use_bias: whether to add a bias.
        depthwise_initializer: of Keras, as all initializers, regularizers and constraints; None for Glorot's.
        pointwise_initializer: likewise.
        bias_initializer: likewise; None for zeros.
        depthwise_regularizer: its loss counts in `tf.losses.get_total_loss`.
        pointwise_regularizer: likewise.
        bias_regularizer: likewise.
        activity_regularizer: likewise.
        depthwise_constraint: of Keras.
        pointwise_constraint: of Keras.
        bias_constraint: of Keras.
        trainable: whether optimizers change its variables.
        name: of the layer.

    >>> SeparableConv1D(4, 3)(keras.ops.ones((2, 8, 3))).shape
    (2, 6, 4)
    """


class SeparableConv2D(_Separable, keras.layers.SeparableConv2D):
    """A convolution of each channel by itself over two axes, then one over channels.

    Args:
        filters: the number of output channels.
        kernel_size: the size of the window: a number, or one for each axis.
        strides: how far the window moves: a number, or one for each axis.
        padding: `"valid"` or `"same"`.
        data_format: `"channels_last"` or `"channels_first"`.
        dilation_rate: the distance of the window's elements.
        depth_multiplier: how many channels the first step makes of each.
        activation: a function, or its name in Keras; None for none.
        use_bias: whether to add a bias.
        depthwise_initializer: of Keras, as all initializers, regularizers and constraints; None for Glorot's.
        pointwise_initializer: likewise.
        bias_initializer: likewise; None for zeros.
        depthwise_regularizer: its loss counts in `tf.losses.get_total_loss`.
        pointwise_regularizer: likewise.
        bias_regularizer: likewise.
        activity_regularizer: likewise.
        depthwise_constraint: of Keras.
        pointwise_constraint: of Keras.
        bias_constraint: of Keras.
        trainable: whether optimizers change its variables.
        name: of the layer.

    >>> SeparableConv2D(4, 3)(keras.ops.ones((2, 8, 8, 3))).shape
    (2, 6, 6, 4)
    """


conv2d_transpose = as_function(Conv2DTranspose, "conv2d_transpose")
conv3d_transpose = as_function(Conv3DTranspose, "conv3d_transpose")
separable_conv1d = as_function(SeparableConv1D, "separable_conv1d")
separable_conv2d = as_function(SeparableConv2D, "separable_conv2d")
