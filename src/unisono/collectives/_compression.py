"""Sums over replicas of arrays that are sent in fewer bytes, and what each replica has not sent.

Every function takes this replica's arrays and returns the sums, which are equal on all replicas, and this
replica's errors: over all replicas, the sums and the errors add up to what was given. Called inside
`jax.shard_map`.

What is sent lies in integers: XLA:CPU widens bfloat16 to float32 before an all-reduce, an all-gather or a
permutation, and its all-gather of a type of one or two bytes is Gloo's own (jaxlib 0.10.2, November 2026).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unisono.collectives._packing import pack, plan, split_rows, unpack

#: The sums, and what of this replica's arrays is not in them.
SumsAndErrors = tuple[list[jax.Array], list[jax.Array]]

#: Sums arrays over the replicas exactly.
Summed = Callable[[list[jax.Array]], list[jax.Array]]


class Codec(Protocol):
    """How floats are sent in fewer bytes; numbers that are not finite stay so."""

    def encode(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return what is sent for each row, and the numbers that it stands for.

        Args:
            rows: float32, shape `(rows, size)`.
        """

    def decode(self, sent: jax.Array, size: int) -> jax.Array:
        """Return the numbers, shape `(..., size)`.

        Args:
            sent: shape `(..., encoded size)`.
        """


@dataclasses.dataclass(frozen=True)
class HalfCodec:
    """Floats of two bytes."""

    dtype: str

    def encode(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the rounded numbers as integers, and as float32."""
        largest = float(jnp.finfo(self.dtype).max)  # type: ignore[no-untyped-call]
        within = jnp.where(jnp.isfinite(rows), jnp.clip(rows, -largest, largest), rows)
        # XLA may leave out a conversion to a narrow type and back, and the error would be zero.
        sent = lax.optimization_barrier(lax.bitcast_convert_type(within.astype(self.dtype), jnp.uint16))
        return sent, self.decode(sent, rows.shape[-1])

    def decode(self, sent: jax.Array, size: int) -> jax.Array:
        """Return the numbers as float32."""
        return lax.bitcast_convert_type(sent, jnp.dtype(self.dtype)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class BlockCodec:
    """Integers of one byte, with a float32 for each block: its largest magnitude, divided by 127."""

    block: int

    def encode(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the integers with the scales behind them, as bytes."""
        count, size = rows.shape
        blocks = jnp.pad(rows, ((0, 0), (0, -size % self.block))).reshape(count, -1, self.block)
        scales = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / 127
        # Zeros have the scale zero.
        numbers = jnp.round(blocks / jnp.where(scales == 0, 1, scales)).astype(jnp.int8)
        stands_for = (numbers * scales).reshape(count, -1)[:, :size]
        parts = [lax.bitcast_convert_type(x, jnp.uint8).reshape(count, -1) for x in (numbers, scales)]
        return jnp.concatenate(parts, axis=1), stands_for

    def decode(self, sent: jax.Array, size: int) -> jax.Array:
        """Return the integers times their scales."""
        blocks, above = -(-size // self.block), sent.shape[:-1]
        numbers, scales = jnp.split(sent, [blocks * self.block], axis=-1)
        signed = lax.bitcast_convert_type(numbers, jnp.int8).reshape(*above, blocks, self.block)
        factors = lax.bitcast_convert_type(scales.reshape(*above, blocks, 4), jnp.float32)
        return (signed * factors[..., None]).reshape(*above, -1)[..., :size]


def encoded_sums(
    arrays: Sequence[jax.Array], codec: Codec, *, axis_name: str, axis_size: int, in_parts: bool = False
) -> SumsAndErrors:
    """Sum arrays in a codec: two replicas exchange them, more scatter the sums and gather them.

    A replica sends as many bytes as for an all-reduce of the encoded numbers. Each sum is made of float32; in
    the second round it is encoded once more, whose error the replica keeps that made the sum.

    Args:
        in_parts: return of each sum this replica's part alone, as `split_rows` divides it.
    """
    rows = [split_rows(a, axis_size) for a in arrays]
    packing = plan([(r.shape[1:], r.dtype) for r in rows], num_packs=1)
    (packed,) = jax.vmap(lambda each: pack(each, packing))(rows)
    size = packed.shape[1]
    sent, stands_for = codec.encode(packed)
    errors = packed - stands_for
    if axis_size == 2 and not in_parts:
        # In one round, and the sum is not rounded again.
        sums = codec.decode(lax.all_gather(sent, axis_name), size).sum(axis=0)
    else:
        received = lax.all_to_all(sent, axis_name, 0, 0)
        sums = codec.decode(received, size).sum(axis=0)
        if not in_parts:
            again, rounded = codec.encode(sums[None])
            errors = errors.at[lax.axis_index(axis_name)].add(sums - rounded[0])
            sums = codec.decode(lax.all_gather(again[0], axis_name), size)
    left = [_shaped(e, a) for e, a in zip(unpack([errors], packing), arrays, strict=True)]
    found = unpack([sums], packing)
    return (found if in_parts else [_shaped(s, a) for s, a in zip(found, arrays, strict=True)]), left


def _shaped(rows: jax.Array, like: jax.Array) -> jax.Array:
    return rows.reshape(-1)[: like.size].reshape(like.shape)


def largest_sums(arrays: Sequence[jax.Array], fraction: float, *, axis_name: str) -> SumsAndErrors:
    """Sum of each replica the numbers of the largest magnitude, with their places.

    Source: Lin et al., "Deep gradient compression", 2018 (https://arxiv.org/abs/1712.01887).

    Args:
        fraction: how many numbers a replica sends, of those of all arrays together.
    """
    packing = plan([(a.shape, a.dtype) for a in arrays], num_packs=1)
    (packed,) = pack(arrays, packing)
    _, places = lax.top_k(jnp.abs(packed), max(1, round(fraction * packed.size)))
    # In one message: a float32 has as many bits as a place.
    sent = jnp.stack([lax.bitcast_convert_type(packed[places], jnp.int32), places.astype(jnp.int32)])
    received = lax.all_gather(sent, axis_name)
    values = lax.bitcast_convert_type(received[:, 0], jnp.float32)
    total = jnp.zeros_like(packed).at[received[:, 1].reshape(-1)].add(values.reshape(-1))
    return unpack([total], packing), unpack([packed.at[places].set(0)], packing)


def low_rank_sums(
    arrays: Sequence[jax.Array], bases: Sequence[jax.Array], summed: Summed
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Sum matrices as products of two thin ones, by one step of a power iteration; return new bases, too.

    Source: Vogels et al., "PowerSGD", 2019 (https://arxiv.org/abs/1905.13727). A replica's error is what its
    own matrix has outside of the columns that all have found.

    Args:
        arrays: of float32; their last dimension makes the columns of a matrix.
        bases: the last step's, of shape `(columns, rank)`, equal on all replicas.
        summed: sums the left factors, and then the right ones.
    """
    matrices = [a.reshape(-1, a.shape[-1]) for a in arrays]
    found = summed([m @ b for m, b in zip(matrices, bases, strict=True)])
    left = [jnp.linalg.qr(f)[0] for f in found]
    own = [m.T @ p for m, p in zip(matrices, left, strict=True)]
    right = summed(own)
    sums, errors, after = [], [], []
    for array, matrix, p, mine, q in zip(arrays, matrices, left, own, right, strict=True):
        sums.append((p @ q.T).reshape(array.shape))
        errors.append((matrix - p @ mine.T).reshape(array.shape))
        # Its length does not matter, and must not shrink with that of the gradients.
        after.append(q / jnp.maximum(jnp.linalg.norm(q), np.finfo(np.float32).tiny))
    return sums, errors, after
