"""Rows of a batch: filling up a batch that does not divide, and which models allow it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

#: Keras layers whose result for a row depends on the other rows, or on where the row lies.
_MIXES_ROWS = (
    keras.layers.BatchNormalization,
    keras.layers.Lambda,
    keras.layers.Masking,
)


def pad_rows(array: Any, parts: int) -> Any:
    """Repeat the last row until the number of rows divides by `parts`.

    True rows, and not zeros, because a row of zeros may give NaN where a true one does not.

    >>> pad_rows(np.array([1, 2, 3]), 2)
    array([1, 2, 3, 3])
    """
    missing = -len(array) % parts
    if missing == 0:
        return array
    library = np if isinstance(array, np.ndarray) else jnp
    return library.concatenate([array, library.repeat(array[-1:], missing, axis=0)])


def depends_on_batch(model: Any) -> str | None:
    """Return why a model may not see padded rows, or None when every layer treats rows apart.

    Args:
        model: a built Keras model.
    """
    if type(model) not in (keras.Sequential, keras.Model, _functional()):
        return f"the model is of the class {type(model).__name__}, whose code may mix rows"
    for layer in model._flatten_layers(include_self=False):
        reason = _layer_mixes_rows(layer)
        if reason:
            return reason
    if not isinstance(model, keras.Sequential):
        for operation in model.operations:
            if not isinstance(operation, keras.Layer):
                return f"the operation {operation.name!r} may mix rows"
    return None


def _functional() -> type:
    """The class of `keras.Model(inputs, outputs)`, which Keras exports under no public name."""
    return type(keras.Model(*[keras.Input((1,))] * 2))


def _layer_mixes_rows(layer: Any) -> str | None:
    if type(layer) in (keras.Sequential, _functional()):
        return None
    if isinstance(layer, _MIXES_ROWS) or not type(layer).__module__.startswith("keras."):
        return f"the layer {layer.name!r} ({type(layer).__name__}) may mix rows"
    if getattr(layer, "mask_zero", False):
        return f"the layer {layer.name!r} makes a mask"
    if layer.activity_regularizer is not None:
        return f"the layer {layer.name!r} has an activity regularizer"
    return None
