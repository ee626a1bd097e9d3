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
    if not _is_keras_own(model):
        return f"the model is of the class {type(model).__name__}, whose code may mix rows"
    for layer in model._flatten_layers(include_self=False):
        reason = _layer_mixes_rows(layer)
        if reason:
            return reason
    nested = [layer for layer in model._flatten_layers() if isinstance(layer, keras.Model)]
    for part in nested:
        for operation in getattr(part, "operations", ()):
            if not isinstance(operation, keras.Layer):
                return f"the operation {operation.name!r} may mix rows"
    return None


def _is_keras_own(layer: Any) -> bool:
    """Whether a layer's code is Keras' and not a user's."""
    return type(layer).__module__.startswith("keras.")


def _layer_mixes_rows(layer: Any) -> str | None:
    if isinstance(layer, keras.Model) and _is_keras_own(layer):
        return None  # its own layers are asked one by one
    if isinstance(layer, _MIXES_ROWS) or not _is_keras_own(layer):
        return f"the layer {layer.name!r} ({type(layer).__name__}) may mix rows"
    if getattr(layer, "mask_zero", False):
        return f"the layer {layer.name!r} makes a mask"
    if layer.activity_regularizer is not None:
        return f"the layer {layer.name!r} has an activity regularizer"
    return None
