"""Tensors of given numbers: ranges, zeros, ones, identities.

Tests: tests/unit/tf/test_operations.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from unisono.tf.adapters.inputs._host_tensor import HostTensor, is_text_dtype, text


def arange(start: Any, limit: Any = None, delta: Any = 1, dtype: DTypeLike | None = None) -> Any:
    """Return the numbers from `start` (0 where it is alone) up to `limit`.

    >>> arange(3).tolist(), arange(1, 6, 2).tolist()
    ([0, 1, 2], [1, 3, 5])
    """
    if limit is None:
        start, limit = 0, start
    found = jnp.arange(start, limit, delta, dtype)
    if isinstance(found, jax.core.Tracer) and not any(
        isinstance(x, jax.core.Tracer) for x in (start, limit, delta)
    ):
        # In a function a loop over it has indices that are known.
        return np.asarray(np.arange(start, limit, delta), found.dtype).view(HostTensor)
    return found


def zeros(shape: Any, dtype: DTypeLike = "float32", *, layout: None = None) -> Any:
    """Return zeros; of strings, empty ones."""
    if is_text_dtype(dtype):
        return text(np.full(tuple(shape), "", object))
    return jnp.zeros(shape, dtype)


def ones(shape: Any, dtype: DTypeLike = "float32", *, layout: None = None) -> Any:
    """Return ones."""
    return jnp.ones(shape, dtype)


def eye(
    num_rows: int,
    num_columns: int | None = None,
    batch_shape: Sequence[int] | None = None,
    dtype: DTypeLike = "float32",
) -> Any:
    """Return an identity matrix, or a batch of them."""
    made = jnp.eye(num_rows, num_columns, dtype=dtype)
    return made if batch_shape is None else jnp.broadcast_to(made, (*batch_shape, *made.shape))
