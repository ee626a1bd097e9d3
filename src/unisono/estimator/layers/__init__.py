"""Layers with TensorFlow 1's names and arguments: `tf.layers`.

Each class is a Keras layer. Each function makes a layer and calls it: with `name=` and `reuse=True` it is the
layer of an earlier call in the same run of the model_fn.
Source: https://www.tensorflow.org/versions/r1.15/api_docs/python/tf/layers
"""

from __future__ import annotations

import importlib
from typing import Any

from unisono._names import no_attribute

#: Where each public name lives.
_HOMES = {
    "_convolutions": [
        "Conv1D", "Conv2D", "Conv3D", "conv1d", "conv2d", "conv3d",
    ],
    "_core": [
        "BatchNormalization", "Dense", "Dropout", "Flatten", "batch_normalization", "dense", "dropout",
        "flatten",
    ],
    "_other_convolutions": [
        "Conv2DTranspose", "Conv3DTranspose", "SeparableConv1D", "SeparableConv2D", "conv2d_transpose",
        "conv3d_transpose", "separable_conv1d", "separable_conv2d",
    ],
    "_pooling": [
        "AveragePooling1D", "AveragePooling2D", "AveragePooling3D", "MaxPooling1D", "MaxPooling2D",
        "MaxPooling3D", "average_pooling1d", "average_pooling2d", "average_pooling3d", "max_pooling1d",
        "max_pooling2d", "max_pooling3d",
    ],
    "_scopes": ["AUTO_REUSE", "VariableScope", "get_variable", "get_variable_scope", "variable_scope"],
}  # fmt: skip

_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 (computed, and tested)


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise no_attribute(__name__, name, __all__)
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__
