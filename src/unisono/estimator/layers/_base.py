"""The base of TensorFlow 1's layers on those of Keras, and of the functions that call them.

Tests: tests/unit/estimator/test_layers.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import keras

from unisono._types import PyTree
from unisono.estimator._collections import current_collections
from unisono.estimator._docstrings import Texts
from unisono.estimator.layers._scopes import found_or_made

#: What Keras' layers take: a name, a function, an object or None.
KerasArgument: TypeAlias = Any

#: Arguments that are None in TensorFlow 1, for what Keras names.
_DEFAULTS = {
    "kernel_initializer": "glorot_uniform",
    "depthwise_initializer": "glorot_uniform",
    "pointwise_initializer": "glorot_uniform",
    "bias_initializer": "zeros",
}


def texts_of(*variables: str) -> dict[str, str]:
    """Return the texts for initializers, regularizers and constraints of variables."""
    ends = {
        "initializer": "initializer of Keras, or its name",
        "regularizer": "regularizer of Keras, whose loss `tf.losses.get_total_loss` adds; None for none",
        "constraint": "constraint of Keras; None for none",
    }
    texts = {f"{variable}_{end}": text for variable in variables for end, text in ends.items()}
    return {
        name: f'{text}; None for `"{_DEFAULTS[name]}"`.' if name in _DEFAULTS else f"{text}."
        for name, text in texts.items()
    }


#: The texts for arguments of layers, and of the functions that make and call them.
TEXTS = Texts(
    {
        **texts_of("kernel", "depthwise", "pointwise", "bias"),
        "activation": "function, or its name in Keras; None for none.",
        "activity_regularizer": "regularizer of Keras for the outputs, whose loss `tf.losses.get_total_loss` "
        "adds; None for none.",
        "data_format": '`"channels_last"`, or `"channels_first"` where channels are the second axis.',
        "depth_multiplier": "whole number; how many channels the first convolution makes of each channel.",
        "dilation_rate": "whole number, or one for each axis; the distance of the elements of a window.",
        "filters": "whole number; how many channels the outputs have.",
        "kernel_size": "whole number, or one for each axis; the size of a window.",
        "name": "string; the name of the layer. None for an automatic one.",
        "padding": '`"valid"` where windows lie inside of the inputs, or `"same"` where inputs are padded.',
        "pool_size": "whole number, or one for each axis; the size of a window.",
        "reuse": "True, False or `AUTO_REUSE`; whether the layer of this name is meant that an earlier call "
        "has made. None for what the variable scope says.",
        "strides": "whole number, or one for each axis; the distance of two windows.",
        "trainable": "bool; whether optimizers change the variables.",
        "units": "whole number; the size of the last axis of the outputs.",
        "use_bias": "bool; whether a variable is added to the outputs.",
    }
)

#: When the functions raise errors.
REUSED = {
    "ContextError": "`reuse` is True or `AUTO_REUSE` outside of a model_fn.",
    "InvalidArgumentError": "an earlier call has used `name`, or has not, against what `reuse` says.",
}


class GraphLayer(keras.Layer):
    """A Keras layer with the defaults of TensorFlow 1, whose regularizers count in `tf.losses`."""

    def __init__(self, **options: Any) -> None:
        given = {
            key: _DEFAULTS.get(key) if value is None and key in _DEFAULTS else value
            for key, value in options.items()
        }
        super().__init__(**given)
        collections = current_collections()
        if collections is not None:
            collections.made.append(self)

    def apply(self, inputs: PyTree, *args: Any, **kwargs: Any) -> PyTree:
        """Call the layer.

        Args:
            inputs: array, or several in lists and dicts.
            args: arguments of the call after `inputs`.
            kwargs: arguments of the call by their names.

        Returns:
            The outputs of the layer, an array.
        """
        return self(inputs, *args, **kwargs)


def as_function(cls: type[GraphLayer], kind: str, shape: str) -> Callable[..., jax.Array]:
    """Return the function of a layer's arguments that makes the layer and calls it."""
    own = inspect.signature(cls)

    def function(inputs: PyTree, *args: Any, reuse: bool | str | None = None, **kwargs: Any) -> jax.Array:
        given = dict(own.bind(*args, **kwargs).arguments)
        name = given.pop("name", None)
        layer = found_or_made(kind, cls, name, reuse, lambda name: cls(**given, name=name))
        result: jax.Array = layer(inputs)
        return result

    inputs = inspect.Parameter("inputs", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    reuse = inspect.Parameter("reuse", inspect.Parameter.KEYWORD_ONLY, default=None)
    function.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[inputs, *own.parameters.values(), reuse]
    )
    function.__name__ = function.__qualname__ = kind
    function.__module__ = cls.__module__
    function.__doc__ = f"Make a `{cls.__name__}`, or take an earlier one, and return what it computes."
    return TEXTS.with_texts(
        inputs=f"float array of shape `{shape}`.",
        returns="The outputs of the layer, a float array.",
        raises=REUSED,
    )(function)
