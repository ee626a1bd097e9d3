"""Convolutions, their transposes and those in two steps, and pooling, with TensorFlow 1's arguments.

Tests: tests/unit/estimator/test_layers.py.
"""

from __future__ import annotations

import keras

from unisono.estimator.layers._base import (
    IMAGES,
    STEPS,
    TEXTS,
    VOLUMES,
    GraphLayer,
    KerasArgument,
    Sizes,
    as_function,
    own_arguments,
)


class _Convolution(GraphLayer):
    """A convolution, with TensorFlow 1's order of arguments."""

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
        super().__init__(**own_arguments(locals()))


@TEXTS
class Conv1D(_Convolution, keras.layers.Conv1D):
    """A convolution over one axis.

    >>> Conv1D(4, 3)(keras.ops.ones((2, 8, 3))).shape
    (2, 6, 4)
    """


@TEXTS
class Conv2D(_Convolution, keras.layers.Conv2D):
    """A convolution over two axes.

    >>> Conv2D(4, 3, padding="same")(keras.ops.ones((2, 8, 8, 3))).shape
    (2, 8, 8, 4)
    """


@TEXTS
class Conv3D(_Convolution, keras.layers.Conv3D):
    """A convolution over three axes.

    >>> Conv3D(4, 3)(keras.ops.ones((2, 4, 4, 4, 3))).shape
    (2, 2, 2, 2, 4)
    """


class _Transpose(GraphLayer):
    """A transpose, with TensorFlow 1's order of arguments."""

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
        super().__init__(**own_arguments(locals()))


@TEXTS
class Conv2DTranspose(_Transpose, keras.layers.Conv2DTranspose):
    """The transpose of a convolution over two axes.

    >>> Conv2DTranspose(4, 2, strides=2)(keras.ops.ones((2, 4, 4, 3))).shape
    (2, 8, 8, 4)
    """


@TEXTS
class Conv3DTranspose(_Transpose, keras.layers.Conv3DTranspose):
    """The transpose of a convolution over three axes.

    >>> Conv3DTranspose(4, 2, strides=2)(keras.ops.ones((2, 2, 2, 2, 3))).shape
    (2, 4, 4, 4, 4)
    """


class _SeparableConvolution(GraphLayer):
    """A convolution in two steps, with TensorFlow 1's order of arguments."""

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
        super().__init__(**own_arguments(locals()))


@TEXTS
class SeparableConv1D(_SeparableConvolution, keras.layers.SeparableConv1D):
    """A convolution of each channel by itself over one axis, then one over channels.

    >>> SeparableConv1D(4, 3)(keras.ops.ones((2, 8, 3))).shape
    (2, 6, 4)
    """


@TEXTS
class SeparableConv2D(_SeparableConvolution, keras.layers.SeparableConv2D):
    """A convolution of each channel by itself over two axes, then one over channels.

    >>> SeparableConv2D(4, 3)(keras.ops.ones((2, 8, 8, 3))).shape
    (2, 6, 6, 4)
    """


class _Pooling(GraphLayer):
    """A pooling layer, with the arguments that TensorFlow 1 requires."""

    def __init__(
        self,
        pool_size: Sizes,
        strides: Sizes,
        padding: str = "valid",
        data_format: str = "channels_last",
        name: str | None = None,
    ) -> None:
        super().__init__(**own_arguments(locals()))


@TEXTS
class MaxPooling1D(_Pooling, keras.layers.MaxPooling1D):
    """The largest value of each window over one axis.

    >>> MaxPooling1D(2, 2)(keras.ops.ones((2, 8, 3))).shape
    (2, 4, 3)
    """


@TEXTS
class MaxPooling2D(_Pooling, keras.layers.MaxPooling2D):
    """The largest value of each window over two axes.

    >>> MaxPooling2D(2, 2)(keras.ops.ones((2, 8, 8, 3))).shape
    (2, 4, 4, 3)
    """


@TEXTS
class MaxPooling3D(_Pooling, keras.layers.MaxPooling3D):
    """The largest value of each window over three axes.

    >>> MaxPooling3D(2, 2)(keras.ops.ones((2, 8, 8, 8, 3))).shape
    (2, 4, 4, 4, 3)
    """


@TEXTS
class AveragePooling1D(_Pooling, keras.layers.AveragePooling1D):
    """The mean of each window over one axis.

    >>> AveragePooling1D(2, 2)(keras.ops.ones((2, 8, 3))).shape
    (2, 4, 3)
    """


@TEXTS
class AveragePooling2D(_Pooling, keras.layers.AveragePooling2D):
    """The mean of each window over two axes.

    >>> AveragePooling2D(2, 2)(keras.ops.ones((2, 8, 8, 3))).shape
    (2, 4, 4, 3)
    """


@TEXTS
class AveragePooling3D(_Pooling, keras.layers.AveragePooling3D):
    """The mean of each window over three axes.

    >>> AveragePooling3D(2, 2)(keras.ops.ones((2, 8, 8, 8, 3))).shape
    (2, 4, 4, 4, 3)
    """


conv1d, conv2d, conv3d = (
    as_function(Conv1D, "conv1d", STEPS),
    as_function(Conv2D, "conv2d", IMAGES),
    as_function(Conv3D, "conv3d", VOLUMES),
)
conv2d_transpose = as_function(Conv2DTranspose, "conv2d_transpose", IMAGES)
conv3d_transpose = as_function(Conv3DTranspose, "conv3d_transpose", VOLUMES)
separable_conv1d = as_function(SeparableConv1D, "separable_conv1d", STEPS)
separable_conv2d = as_function(SeparableConv2D, "separable_conv2d", IMAGES)
max_pooling1d = as_function(MaxPooling1D, "max_pooling1d", STEPS)
max_pooling2d = as_function(MaxPooling2D, "max_pooling2d", IMAGES)
max_pooling3d = as_function(MaxPooling3D, "max_pooling3d", VOLUMES)
average_pooling1d = as_function(AveragePooling1D, "average_pooling1d", STEPS)
average_pooling2d = as_function(AveragePooling2D, "average_pooling2d", IMAGES)
average_pooling3d = as_function(AveragePooling3D, "average_pooling3d", VOLUMES)
