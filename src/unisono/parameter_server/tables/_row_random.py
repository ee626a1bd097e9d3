"""Random numbers of some rows of an array, with the bits that JAX's generator gives them in the whole array.

The generator computes the bits of an element of its key and its position alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp

from unisono.parameter_server.tables._row_values import NotByRowsError


def random_rows(key: jax.Array, numbers: jax.Array, shape: Sequence[int], bit_width: int) -> jax.Array:
    """Return rows of random bits.

    Raises:
        NotByRowsError: for a generator whose bits depend on more than that.

    >>> rows = random_rows(jax.random.key(3), jnp.array([2, 0]), (4, 5), 32)
    >>> bool((rows == jax.random.bits(jax.random.key(3), (4, 5))[jnp.array([2, 0])]).all())
    True
    """
    if (
        str(jax.random.key_impl(key)) not in ("fry", "threefry2x32")
        or not jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    ):
        raise NotByRowsError("its random numbers depend on its shape")
    width = math.prod(shape[1:])
    high, low = _times(numbers.astype(jnp.uint32), width)
    columns = jnp.arange(width, dtype=jnp.uint32)
    lows = low[:, None] + columns
    highs = high[:, None] + (lows < columns).astype(jnp.uint32)
    counts = jnp.concatenate([highs.reshape(-1), lows.reshape(-1)])
    bits = jax.extend.random.threefry_2x32(jax.random.key_data(key), counts)
    ones, others = jnp.split(bits, 2)
    dtype = jnp.dtype(f"uint{bit_width}")
    if bit_width == 64:
        found = ones.astype(dtype) << 32 | others.astype(dtype)
    else:
        found = (ones ^ others).astype(dtype)
    return found.reshape(numbers.shape[0], *shape[1:])


def _times(numbers: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """Return the upper and lower 32 bits of a product, without types of 64 bits."""
    half: Any = jnp.uint32(0xFFFF)
    ones = [numbers & half, numbers >> 16]
    others = [jnp.uint32(factor & 0xFFFF), jnp.uint32(factor >> 16 & 0xFFFF)]
    low, middle = ones[0] * others[0], ones[1] * others[0]
    carried = (low >> 16) + (middle & half)
    across = ones[0] * others[1]
    carried2 = carried + (across & half)
    high = ones[1] * others[1] + (middle >> 16) + (across >> 16) + (carried2 >> 16)
    return high, (carried2 << 16) | (low & half)
