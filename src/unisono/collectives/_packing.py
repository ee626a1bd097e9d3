"""Pack many arrays into few flat buckets, and unpack them; pure.

A collective costs a fixed time for each array besides the time for its bytes, so small arrays
are sent together. A bucket holds arrays of one data type, in the order of the arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from unisono._errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class PackingPlan:
    """The assignment of arrays to buckets.

    Args:
        shapes: the shapes of the arrays.
        buckets: for each bucket, the positions of its arrays.
    """

    shapes: tuple[tuple[int, ...], ...]
    buckets: tuple[tuple[int, ...], ...]


def plan(
    shapes_and_dtypes: Sequence[tuple[tuple[int, ...], DTypeLike]],
    *,
    bytes_per_pack: int = 0,
    num_packs: int = 0,
    smaller_than: int = 0,
) -> PackingPlan:
    """Decide which arrays share a bucket; without any rule each array has its own.

    Args:
        bytes_per_pack: the size at which a bucket is closed, in bytes; 0 disables the rule.
        num_packs: the most buckets, of nearly equal size, for each data type; 0 disables the rule.
        smaller_than: arrays of fewer bytes share one bucket for each data type, and larger ones
            have their own; 0 disables the rule.

    Raises:
        InvalidArgumentError: for negative numbers, or more than one rule.

    >>> plan([((2,), "float32"), ((3,), "float32")], num_packs=1).buckets
    ((0, 1),)
    """
    rules = (bytes_per_pack, num_packs, smaller_than)
    if min(rules) < 0 or sum(rule > 0 for rule in rules) > 1:
        raise InvalidArgumentError(
            "Give at most one of `bytes_per_pack`, `num_packs` and `smaller_than`, 0 or more. "
            f"Received: {rules}."
        )
    shapes = tuple(tuple(shape) for shape, _ in shapes_and_dtypes)
    sizes = [int(np.prod(s)) * np.dtype(d).itemsize for s, d in shapes_and_dtypes]
    # By data type: a flat buffer has one, and a conversion would change bits.
    groups: dict[str, list[int]] = {}
    for position, (_, dtype) in enumerate(shapes_and_dtypes):
        groups.setdefault(str(np.dtype(dtype)), []).append(position)
    buckets: list[tuple[int, ...]] = []
    for group in groups.values():
        if smaller_than:
            buckets.extend(_by_size(group, sizes, smaller_than))
        elif bytes_per_pack or num_packs:
            # Rounded up, or the rest would open one bucket more than `num_packs`.
            limit = bytes_per_pack or -(-sum(sizes[i] for i in group) // num_packs)
            buckets.extend(_by_limit(group, sizes, limit))
        else:
            buckets.extend((i,) for i in group)
    return PackingPlan(shapes, tuple(buckets))


def _by_size(group: list[int], sizes: list[int], smaller_than: int) -> list[tuple[int, ...]]:
    small = tuple(i for i in group if sizes[i] < smaller_than)
    return [(i,) for i in group if sizes[i] >= smaller_than] + ([small] if small else [])


def _by_limit(group: list[int], sizes: list[int], limit: int) -> list[tuple[int, ...]]:
    """Divide a group into buckets, each closed when it has reached the limit."""
    buckets: list[list[int]] = [[]]
    total = 0
    for i in group:
        # An array without elements must not open a bucket, or there could be more than `num_packs`.
        if buckets[-1] and total >= limit and sizes[i]:
            buckets.append([])
            total = 0
        buckets[-1].append(i)
        total += sizes[i]
    return [tuple(bucket) for bucket in buckets]


def pack(arrays: Sequence[jax.Array], plan: PackingPlan) -> list[jax.Array]:
    """Return the flat buckets of `arrays`; a bucket of one array is that array, flattened."""
    return [_concatenate([arrays[i] for i in bucket]) for bucket in plan.buckets]


def _concatenate(arrays: list[jax.Array]) -> jax.Array:
    if len(arrays) == 1:
        return jnp.ravel(arrays[0])
    # One kernel for all arrays. Updates of a buffer in place were one for each, and LLVM compiled every one:
    # on two cores, jaxlib 0.10.2, 80 arrays of 16 KiB took 1.5 s to compile and 2.9 ms to send; now 1.0 s and
    # 2.7 ms (November 2026). A bucket of 8 MiB takes 13.4 ms instead of 17.5.
    return jnp.concatenate([jnp.ravel(array) for array in arrays])


def unpack(buckets: Sequence[jax.Array], plan: PackingPlan) -> list[jax.Array]:
    """Return the arrays; the inverse of `pack`.

    Args:
        buckets: flat along their last axis; the axes before it are kept in front of each array's shape.
    """
    arrays: dict[int, jax.Array] = {}
    for bucket, positions in zip(buckets, plan.buckets, strict=True):
        sizes = [int(np.prod(plan.shapes[i])) for i in positions]
        for i, start, size in zip(positions, _starts(bucket, sizes), sizes, strict=True):
            flat = jax.lax.dynamic_slice_in_dim(bucket, start, size, axis=-1)
            arrays[i] = flat.reshape(*bucket.shape[:-1], *plan.shapes[i])
    return [arrays[i] for i in range(len(plan.shapes))]


def split_rows(array: jax.Array, parts: int) -> jax.Array:
    """Return an array as rows of equal lengths, shape `(parts, ceil(size / parts))`; zeros fill the last.

    >>> split_rows(jnp.arange(3), 2).tolist()
    [[0, 1], [2, 0]]
    """
    return jnp.pad(jnp.ravel(array), (0, -array.size % parts)).reshape(parts, -1)


def _starts(bucket: jax.Array, sizes: list[int]) -> Sequence[int | jax.Array]:
    """Where each array begins in the bucket, on CPUs as numbers that the compiler does not know.

    XLA fuses a slice into the operations that read it, such as an optimizer's. XLA:CPU compiles equal fusions
    once, but a known start makes each of them different: of 50 dense layers Adam's updates were 269 kernels
    in place of 9, and the first step took 10.2 s of CPU time in place of 4.0 (jaxlib 0.10.2, November 2026).
    XLA replaces constants behind an optimization barrier or in a loop, but not the results of a conditional.
    """
    starts = [0, *np.cumsum(sizes).tolist()][: len(sizes)]
    if len(sizes) == 1 or bucket.size == 0 or bucket.shape[-1] > np.iinfo(np.uint32).max:
        return starts

    def known(_: jax.Array) -> list[jax.Array]:
        return [jnp.uint32(start) for start in starts]

    def unknown(bucket: jax.Array) -> list[jax.Array]:
        first = jnp.real(bucket[(0,) * bucket.ndim])
        never = (first < 0) & (first > 0)
        hidden: list[jax.Array] = jax.lax.cond(
            never, lambda: [jnp.uint32(0)] * len(starts), lambda: known(bucket)
        )
        return hidden

    found: list[jax.Array] = jax.lax.platform_dependent(bucket, cpu=unknown, default=known)
    return found
