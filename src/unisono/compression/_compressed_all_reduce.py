"""`CompressedAllReduce`: gradients travel between the replicas in fewer bytes.

What an optimizer adds for it, and how a step uses it, is in `compression/_compressed_layout`.

Functions that sum take a replica's arrays, inside `jax.shard_map`. They return the sums, which are equal on
all replicas, and this replica's errors: over all replicas, sums and errors add up to what was given.

What is sent lies in integers: XLA:CPU widens bfloat16 to float32 before an all-reduce, an all-gather or a
permutation, and its all-gather of a type of one or two bytes is Gloo's own (jaxlib 0.10.2, November 2026).

Tests: tests/virtual/collectives/test_compression.py, tests/virtual/strategies/test_compressed_gradients.py.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unisono._checks import is_number, whole_number
from unisono._errors import InvalidArgumentError
from unisono._mesh import ReplicaMesh
from unisono._types import Tree
from unisono._values import ReduceOp
from unisono.collectives._cross_device import CrossDeviceOps
from unisono.collectives._packing import pack, plan, split_rows, unpack
from unisono.collectives._process_group import ProcessGroup
from unisono.compression._compressed_layout import CompressedLayout
from unisono.step._layout import StateLayout

#: The kinds, each with the argument that belongs to it, and its value where a user gives none.
_KINDS: dict[str, dict[str, float]] = {
    "bfloat16": {},
    "float16": {},
    "int8": {"block": 256},
    "power_sgd": {"rank": 4},
    "top_k": {"k": 0.01},
}


@dataclasses.dataclass(frozen=True)
class Compression:
    """What is done with the gradients of a step.

    Args:
        setting: the value of the kind's own argument; 0 where it has none.
        exact_below: gradients of fewer bytes are summed exactly.
    """

    kind: str
    setting: float
    exact_below: int

    @property
    def has_parts(self) -> bool:
        """Whether a replica can be sent its part of the sums alone."""
        return self.kind not in ("power_sgd", "top_k")

    @property
    def can_divide(self) -> bool:
        """True if parts of gradients may be compressed each by itself; thin matrices are of whole ones."""
        return self.kind != "power_sgd"

    def applies_to(self, shape: Sequence[int], dtype: str) -> bool:
        """Return whether gradients of a weight are compressed."""
        if len(shape) == 0 or str(dtype) != "float32" or 4 * math.prod(shape) < max(self.exact_below, 1):
            return False
        if self.kind != "power_sgd":
            return True
        # Two thin matrices must be smaller than the one that they stand for.
        columns, rank = self.basis_shape(shape) or (0, 0)
        return rank > 0 and rank * (columns + math.prod(shape) // columns) < math.prod(shape)

    def basis_shape(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return the shape of what a weight keeps besides its errors; None where there is nothing."""
        if self.kind != "power_sgd" or len(shape) < 2:
            return None
        return shape[-1], min(int(self.setting), shape[-1], math.prod(shape[:-1]))

    def sums(
        self,
        arrays: Sequence[jax.Array],
        bases: Sequence[jax.Array],
        exact: CrossDeviceOps,
        *,
        axis_name: str,
        axis_size: int,
        in_parts: bool,
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        """Return the sums over the replicas, this replica's errors, and new bases.

        Args:
            arrays: that `applies_to` allows.
            bases: of shapes `basis_shape`, for each array; empty where there are none.
            exact: sums what `power_sgd` sends.
            in_parts: whether this replica's flat parts of the sums are enough; only where `has_parts`.
        """

        def summed(factors: list[jax.Array]) -> list[jax.Array]:
            found: list[jax.Array] = exact.all_reduce(
                ReduceOp.SUM, factors, axis_name=axis_name, axis_size=axis_size
            )
            return found

        if self.kind == "power_sgd":
            return low_rank_sums(arrays, bases, summed)
        if self.kind == "top_k":
            return *largest_sums(arrays, self.setting, axis_name=axis_name), []
        codec: Codec = BlockCodec(int(self.setting)) if self.kind == "int8" else HalfCodec(self.kind)
        found = encoded_sums(arrays, codec, axis_name=axis_name, axis_size=axis_size, in_parts=in_parts)
        return *found, []


class CompressedAllReduce(CrossDeviceOps):
    """Sum gradients in fewer bytes; what a step does not send is added to the gradients of the next one.

    Gradients are compressed where an optimizer applies them: in `fit` and in custom loops. Losses, metrics,
    what `strategy.reduce` and `ReplicaContext.all_reduce` sum, and small gradients are exact.

    Args:
        kind: `"bfloat16"` or `"float16"`: half of the bytes; `"int8"`: a quarter, with a scale for each
            block; `"power_sgd"`: two thin matrices for each matrix; `"top_k"`: the numbers of the largest
            magnitude with their places.
        rank: of the thin matrices of `"power_sgd"`; 4 by default.
        k: which part of all numbers `"top_k"` sends, more than 0 and at most 1; 0.01 by default.
        block: how many numbers share a scale in `"int8"`; 256 by default.
        exact_below: gradients of fewer bytes are summed exactly, and with `"power_sgd"` those that two thin
            matrices would not make smaller, such as a bias.

    Raises:
        InvalidArgumentError: for another kind, a number out of its range, or one that is not of the kind.

    >>> import unisono
    >>> strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"], CompressedAllReduce("int8"))
    >>> strategy.cross_device_ops
    CompressedAllReduce('int8', block=256)
    """

    def __init__(
        self,
        kind: Literal["bfloat16", "float16", "int8", "power_sgd", "top_k"] = "bfloat16",
        *,
        rank: int | None = None,
        k: float | None = None,
        block: int | None = None,
        exact_below: int = 8192,
    ) -> None:
        if kind not in _KINDS:
            raise InvalidArgumentError(
                f"`kind` must be one of {list(_KINDS)}. Received: kind={kind!r}. "
                'Write `CompressedAllReduce("bfloat16")`, for example.'
            )
        own, given = _KINDS[kind], {"rank": rank, "k": k, "block": block}
        for name, value in given.items():
            if value is not None and name not in own:
                of = next(each for each, names in _KINDS.items() if name in names)
                raise InvalidArgumentError(
                    f'`{name}` is an argument of "{of}". Received: {name}={value!r} with kind={kind!r}. '
                    f'Leave it out, or write `CompressedAllReduce("{of}", {name}={value!r})`.'
                )
        chosen = {n: default if given[n] is None else given[n] for n, default in own.items()}
        for name, value in {**chosen, "exact_below": exact_below}.items():
            _check_range(kind, name, value)
        self._chosen = chosen
        self._exact = CrossDeviceOps()
        self.compression = Compression(kind, next(iter(chosen.values()), 0) or 0, int(exact_below))

    def all_reduce(self, reduce_op: ReduceOp, tree: Tree, *, axis_name: str, axis_size: int) -> Tree:
        """Combine `tree` exactly: what is called here are no gradients that an optimizer applies."""
        return self._exact.all_reduce(reduce_op, tree, axis_name=axis_name, axis_size=axis_size)

    def _over(self, own: CrossDeviceOps) -> CompressedAllReduce:
        """Return the same compression, with a strategy's own algorithm for what is exact."""
        made = copy.copy(self)
        made._exact = own
        return made

    def _layout(self, layout: StateLayout, mesh: ReplicaMesh, group: ProcessGroup) -> StateLayout:
        """Return a layout with the errors of what was not sent; see `CrossDeviceOps.layout`."""
        if mesh.devices_per_replica == 1:
            return CompressedLayout(layout, self, mesh, group)
        from unisono.compression._compressed_grid import CompressedCutLayout

        return CompressedCutLayout(layout, self, mesh, group)

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self._chosen.items())
        return f"CompressedAllReduce({self.compression.kind!r}{options})"


def _check_range(kind: str, name: str, value: object) -> None:
    """Raise for a number out of range."""
    if name == "k":
        is_right, wanted = is_number(value) and 0 < value <= 1, "a number over 0, at most 1"
    elif name == "exact_below":
        is_right, wanted = whole_number(value, 0) is not None, "a number of bytes, 0 or more"
    else:
        is_right, wanted = whole_number(value, 1) is not None, "an integer, 1 or more"
    if not is_right:
        better = _KINDS[kind].get(name, 8192)
        raise InvalidArgumentError(
            f"`{name}` must be {wanted}. Received: {name}={value!r}. "
            f'Write `CompressedAllReduce("{kind}", {name}={better})`.'
        )


# --- sums ------------------------------------------------------------------------------------------

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
