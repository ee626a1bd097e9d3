"""What the layers of TensorFlow 1 have beside those of Keras, and the functions that call them.

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
from unisono.estimator.layers._scopes import found_or_made

#: A number, or one for each axis.
Sizes: TypeAlias = "int | tuple[int, ...] | list[int]"

#: What Keras' layers take: a name, a function, an object or None.
KerasArgument: TypeAlias = Any

#: Arguments that are None in TensorFlow 1, for what Keras names.
_DEFAULTS = {
    "kernel_initializer": "glorot_uniform",
    "depthwise_initializer": "glorot_uniform",
    "pointwise_initializer": "glorot_uniform",
    "bias_initializer": "zeros",
}


class GraphLayer(keras.Layer):
    """A Keras layer with the defaults of TensorFlow 1, whose regularizers count in `tf.losses`.

    Args:
        options: of the Keras layer.
    """

    def __init__(self, **options: Any) -> None:
        given = {
            key: _DEFAULTS.get(key) if value is None and key in _DEFAULTS else value
            for key, value in options.items()
        }
        super().__init__(**given)
        found = current_collections()
        if found is not None:
            found.made.append(self)

    def apply(self, inputs: PyTree, *args: Any, **kwargs: Any) -> PyTree:
        """Return what the layer computes, as a call of it does.

        Args:
            inputs: array.
            args: of the call.
            kwargs: likewise.
        """
        return self(inputs, *args, **kwargs)


def as_function(cls: type[GraphLayer], kind: str) -> Callable[..., jax.Array]:
    """Return the function of a layer's arguments that makes the layer and calls it.

    Args:
        cls: the class.
        kind: the function's name, with which automatic names of layers begin.
    """
    own = inspect.signature(cls)

    def function(inputs: PyTree, *args: Any, reuse: Any = None, **kwargs: Any) -> jax.Array:
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
    function.__doc__ = (
        f"Return what a `{cls.__name__}` computes.\n\n"
        f"    Args:\n        inputs: array.\n        args: those of `{cls.__name__}`.\n"
        "        reuse: whether the layer of this name is meant that an earlier call made.\n"
        f"        kwargs: as `args`.\n    "
    )
    return function
