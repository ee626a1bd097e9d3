"""The layers that differ from those of Keras in the order and the defaults of their arguments alone.

Tests: tests/unit/estimator/test_layers.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import keras

from unisono.estimator._docstrings import argument, class_of
from unisono.estimator.layers._base import TEXTS, GraphLayer, as_function

#: The arguments of a layer in their order, with their defaults.
Arguments: TypeAlias = Mapping[str, object]

#: In place of the default of an argument that must be given.
_REQUIRED = inspect.Parameter.empty

#: The shapes of inputs with one, two or three axes over which windows move.
_STEPS = "(batch, steps, channels)"
_IMAGES = "(batch, height, width, channels)"
_VOLUMES = "(batch, depth, height, width, channels)"

#: The types of arguments; others are what Keras takes.
_TYPES = {
    **dict.fromkeys(("depth_multiplier", "filters", "units"), "int"),
    **dict.fromkeys(("dilation_rate", "kernel_size", "pool_size", "strides"), "Sizes"),
    **dict.fromkeys(("data_format", "padding"), "str"),
    **dict.fromkeys(("trainable", "use_bias"), "bool"),
    "name": "str | None",
}


def _each(variables: Sequence[str], what: str) -> Arguments:
    return {f"{variable}_{what}": None for variable in variables}


def _weights(*kernels: str) -> Arguments:
    """Return the arguments with which layers that have kernels end."""
    return {
        "activation": None,
        "use_bias": True,
        **_each(kernels, "initializer"),
        "bias_initializer": "zeros",
        **_each([*kernels, "bias"], "regularizer"),
        "activity_regularizer": None,
        **_each([*kernels, "bias"], "constraint"),
        "trainable": True,
        "name": None,
    }


_FORM = {"padding": "valid", "data_format": "channels_last"}
_WINDOW = {"filters": _REQUIRED, "kernel_size": _REQUIRED, "strides": 1, **_FORM}
_CONVOLUTION = {**_WINDOW, "dilation_rate": 1, **_weights("kernel")}
_TRANSPOSE = {**_WINDOW, **_weights("kernel")}
_SEPARABLE = {**_WINDOW, "dilation_rate": 1, "depth_multiplier": 1, **_weights("depthwise", "pointwise")}
_POOLING = {"pool_size": _REQUIRED, "strides": _REQUIRED, **_FORM, "name": None}


def _layer(
    name: str, function: str, text: str, arguments: Arguments, shape: str,
    example: str, inputs: tuple[int, ...], outputs: tuple[int, ...],
) -> tuple[type[Any], Callable[..., jax.Array]]:  # fmt: skip
    """Return a class with the arguments of TensorFlow 1, and the function that makes and calls its layers.

    Args:
        name: the class's name, here and in Keras.
        function: the function's name.
        text: the first sentence of the class's docstring.
        shape: the shape of inputs, for the docstring of the function.
        example: the arguments of the example in the class's docstring; `inputs` and `outputs` are its shapes.
    """

    def init(self: GraphLayer, **given: Any) -> None:
        GraphLayer.__init__(self, **given)

    every = [argument(name, value, _TYPES.get(name, "KerasArgument")) for name, value in arguments.items()]
    doc = f"{text}\n\n>>> {name}({example})(keras.ops.ones({inputs})).shape\n{outputs}\n"
    made = TEXTS(class_of(name, (GraphLayer, getattr(keras.layers, name)), doc, every, init))
    return made, as_function(made, function, shape)


def _pooling(kind: str, function: str, value: str, axes: int) -> tuple[type[Any], Callable[..., jax.Array]]:
    """Return a class and a function of one kind of pooling, over so many axes."""
    number, shape = {1: ("one axis", _STEPS), 2: ("two axes", _IMAGES), 3: ("three axes", _VOLUMES)}[axes]
    return _layer(
        f"{kind}{axes}D", f"{function}{axes}d", f"The {value} of each window over {number}.",
        _POOLING, shape, "2, 2", (2, *[8] * axes, 3), (2, *[4] * axes, 3),
    )  # fmt: skip


# fmt: off
Dense, dense = _layer(
    "Dense", "dense", "A product with a matrix, over the last axis.",
    {"units": _REQUIRED, **_weights("kernel")}, "(batch, ..., features)", "4", (2, 3), (2, 4),
)
Flatten, flatten = _layer(
    "Flatten", "flatten", "All axes but the first as one.",
    {"data_format": "channels_last", "name": None}, "(batch, ...)", "", (2, 3, 4), (2, 12),
)
Conv1D, conv1d = _layer(
    "Conv1D", "conv1d", "A convolution over one axis.",
    _CONVOLUTION, _STEPS, "4, 3", (2, 8, 3), (2, 6, 4),
)
Conv2D, conv2d = _layer(
    "Conv2D", "conv2d", "A convolution over two axes.",
    _CONVOLUTION, _IMAGES, '4, 3, padding="same"', (2, 8, 8, 3), (2, 8, 8, 4),
)
Conv3D, conv3d = _layer(
    "Conv3D", "conv3d", "A convolution over three axes.",
    _CONVOLUTION, _VOLUMES, "4, 3", (2, 4, 4, 4, 3), (2, 2, 2, 2, 4),
)
Conv2DTranspose, conv2d_transpose = _layer(
    "Conv2DTranspose", "conv2d_transpose", "The transpose of a convolution over two axes.",
    _TRANSPOSE, _IMAGES, "4, 2, strides=2", (2, 4, 4, 3), (2, 8, 8, 4),
)
Conv3DTranspose, conv3d_transpose = _layer(
    "Conv3DTranspose", "conv3d_transpose", "The transpose of a convolution over three axes.",
    _TRANSPOSE, _VOLUMES, "4, 2, strides=2", (2, 2, 2, 2, 3), (2, 4, 4, 4, 4),
)
SeparableConv1D, separable_conv1d = _layer(
    "SeparableConv1D", "separable_conv1d",
    "A convolution of each channel by itself over one axis, then one over channels.",
    _SEPARABLE, _STEPS, "4, 3", (2, 8, 3), (2, 6, 4),
)
SeparableConv2D, separable_conv2d = _layer(
    "SeparableConv2D", "separable_conv2d",
    "A convolution of each channel by itself over two axes, then one over channels.",
    _SEPARABLE, _IMAGES, "4, 3", (2, 8, 8, 3), (2, 6, 6, 4),
)
MaxPooling1D, max_pooling1d = _pooling("MaxPooling", "max_pooling", "largest value", 1)
MaxPooling2D, max_pooling2d = _pooling("MaxPooling", "max_pooling", "largest value", 2)
MaxPooling3D, max_pooling3d = _pooling("MaxPooling", "max_pooling", "largest value", 3)
AveragePooling1D, average_pooling1d = _pooling("AveragePooling", "average_pooling", "mean", 1)
AveragePooling2D, average_pooling2d = _pooling("AveragePooling", "average_pooling", "mean", 2)
AveragePooling3D, average_pooling3d = _pooling("AveragePooling", "average_pooling", "mean", 3)
