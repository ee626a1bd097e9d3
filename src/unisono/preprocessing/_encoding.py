"""Outputs of the layers in place of integers: one-hot, multi-hot and counts.

Tests: tests/unit/preprocessing/test_lookup.py.
"""

from __future__ import annotations

import keras
import numpy as np

from unisono._errors import InvalidArgumentError

#: The output modes that exist here.
MODES = ("int", "one_hot", "multi_hot", "count")


def checked_mode(mode: str, layer: str, modes: tuple[str, ...] = MODES) -> str:
    """Return an output mode.

    >>> checked_mode("binary", "StringLookup")
    'multi_hot'
    """
    mode = "multi_hot" if mode == "binary" else mode
    if mode not in modes:
        raise InvalidArgumentError(
            f"{layer}'s output_mode must be one of {', '.join(modes)}. Received: {mode!r}. "
            "Keras' own layer, which needs TensorFlow, has others."
        )
    return mode


def encoded(indices: np.ndarray, mode: str, depth: int, dropped: np.ndarray | None = None) -> np.ndarray:
    """Return indices in an output mode.

    Returns:
        The indices, or floats whose last axis has `depth` numbers.

    >>> encoded(np.array([0, 2, 2]), "count", 3)
    array([1., 0., 2.], dtype=float32)
    """
    if mode == "int":
        return indices
    rows: np.ndarray = (indices[..., None] == np.arange(depth)).astype(keras.config.floatx())
    if dropped is not None:
        rows[dropped] = 0
    if mode == "one_hot":
        return rows[..., 0, :] if indices.ndim > 1 and indices.shape[-1] == 1 else rows
    # One value is a sample with one value.
    summed: np.ndarray = rows.sum(axis=-2) if indices.ndim else rows
    return summed.clip(max=1) if mode == "multi_hot" else summed


def encoded_shape(shape: tuple[int | None, ...], mode: str, depth: int) -> tuple[int | None, ...]:
    """Return the shape of what `encoded` returns.

    >>> encoded_shape((None, 3), "multi_hot", 5)
    (None, 5)
    """
    if mode == "int":
        return shape
    if mode == "one_hot" and not (len(shape) > 1 and shape[-1] == 1):
        return (*shape, depth)
    return (*shape[:-1], depth)
