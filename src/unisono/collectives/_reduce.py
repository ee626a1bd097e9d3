"""Collectives inside `jax.shard_map`: the all-reduce algorithms, and all-gather.

All are differentiable: the gradient of an all-reduce is the all-reduce of the gradients. On CPUs none
uses `lax.psum_scatter`, which returns wrong numbers over Gloo
(https://github.com/jax-ml/jax/issues/40830).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._types import Tree
from unisono._values import ReduceOp
from unisono.collectives._packing import PackingPlan, pack, plan, unpack

if TYPE_CHECKING:
    from unisono._system._literals import ReduceOpName

Reducer = Callable[[list[jax.Array], str, int], list[jax.Array]]


def _xla(buckets: list[jax.Array], axis_name: str, axis_size: int) -> list[jax.Array]:
    """XLA's own all-reduce: NCCL on GPUs, ICI on TPUs."""
    return list(lax.psum(buckets, axis_name))


def _each(reduce: Callable[[jax.Array, str, int], jax.Array]) -> Reducer:
    """Return the reducer that sums one bucket after the other."""
    return lambda buckets, axis_name, axis_size: [reduce(b, axis_name, axis_size) for b in buckets]


def _ring(bucket: jax.Array, axis_name: str, axis_size: int) -> jax.Array:
    """Reduce-scatter and all-gather around a ring; each device sends 2(n-1)/n of the bytes.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009.
    """
    chunk = -(-bucket.size // axis_size)
    padded = jnp.pad(bucket, (0, chunk * axis_size - bucket.size)).reshape(axis_size, chunk)
    me = lax.axis_index(axis_name)
    right = [(i, (i + 1) % axis_size) for i in range(axis_size)]
    # Each chunk starts at the device of its number and collects one term per step.
    travelling = padded[me]
    for step in range(1, axis_size):
        travelling = lax.ppermute(travelling, axis_name, right)
        travelling = travelling + padded[(me - step) % axis_size]
    # This device now holds the complete sum of the chunk after its own.
    result = jnp.zeros_like(padded).at[(me + 1) % axis_size].set(travelling)
    for step in range(axis_size - 1):
        travelling = lax.ppermute(travelling, axis_name, right)
        result = result.at[(me - step) % axis_size].set(travelling)
    return result.reshape(-1)[: bucket.size]


def _hierarchical(bucket: jax.Array, axis_name: str, axis_size: int) -> jax.Array:
    """Sum up a binary tree to the first device, and copy the result back down: 2 log2(n) steps."""
    me = lax.axis_index(axis_name)
    # Rounded up: works for any number of devices, where the last pairs are incomplete.
    strides = [1 << k for k in range((axis_size - 1).bit_length())]
    total = bucket
    for stride in strides:
        pairs = [(i + stride, i) for i in range(0, axis_size - stride, 2 * stride)]
        # `ppermute` gives zeros to a device that no pair sends to.
        total = total + lax.ppermute(total, axis_name, pairs)
    for stride in reversed(strides):
        pairs = [(i, i + stride) for i in range(0, axis_size - stride, 2 * stride)]
        received = lax.ppermute(total, axis_name, pairs)
        total = jnp.where(me % (2 * stride) == stride, received, total)
    return total


def _one_device(bucket: jax.Array, axis_name: str, axis_size: int) -> jax.Array:
    """Send all values to the first device, sum them there, and send the result back."""
    me = lax.axis_index(axis_name)
    total = bucket
    for i in range(1, axis_size):
        # In device order on one device, so that the sum has the same bits at every run.
        total = total + lax.ppermute(bucket, axis_name, [(i, 0)])
    result = total
    for i in range(1, axis_size):
        result = jnp.where(me == i, lax.ppermute(total, axis_name, [(0, i)]), result)
    return result


#: Buckets of fewer bytes are exchanged whole: below this size the latency of a round outweighs its bytes.
_WHOLE = 512 * 1024


def _exchange(buckets: list[jax.Array], axis_name: str, axis_size: int) -> list[jax.Array]:
    """Exchange and add between partners at distance 1, 2, 4, …; neighbours, of one worker, come first.

    Small buckets are sent whole in log2(n) rounds (recursive doubling), large ones are halved and
    doubled in 2 log2(n). Over Gloo between two workers a round takes half the time of XLA's all-reduce
    (1.0 and 2.1 ms for 0.9 MB). Where n is not a power of two, XLA's own is used.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
    in MPICH", 2005.
    """
    if axis_size & (axis_size - 1):
        return _xla(buckets, axis_name, axis_size)
    # Between two devices halves would take two rounds for the bytes of one.
    whole = axis_size == 2
    return [
        _doubling(b, axis_name, axis_size)
        if whole or b.nbytes < _WHOLE
        else _halving(b, axis_name, axis_size)
        for b in buckets
    ]


def _partners(axis_size: int, distance: int) -> list[tuple[int, int]]:
    return [(i, i ^ distance) for i in range(axis_size)]


def _distances(axis_size: int) -> list[int]:
    return [1 << k for k in range(axis_size.bit_length() - 1)]


def _doubling(bucket: jax.Array, axis_name: str, axis_size: int) -> jax.Array:
    # Both partners add the same two numbers, and addition is commutative: all devices get the same bits.
    for distance in _distances(axis_size):
        bucket = bucket + lax.ppermute(bucket, axis_name, _partners(axis_size, distance))
    return bucket


def _halving(bucket: jax.Array, axis_name: str, axis_size: int) -> jax.Array:
    me, distances = lax.axis_index(axis_name), _distances(axis_size)
    # Zeros do not change a sum; the end cuts them off.
    padded = jnp.pad(bucket, (0, -bucket.size % axis_size))
    # One dimension of 2 per round: each round chooses a half by one bit of the device's number.
    part = padded.reshape(*[2] * len(distances), -1)
    for distance in distances:
        bit = (me // distance) % 2
        mine, theirs = part[bit], part[1 - bit]
        part = mine + lax.ppermute(theirs, axis_name, _partners(axis_size, distance))
    for distance in reversed(distances):
        bit = (me // distance) % 2
        received = lax.ppermute(part, axis_name, _partners(axis_size, distance))
        part = jnp.where(bit == 0, jnp.stack([part, received]), jnp.stack([received, part]))
    return part.reshape(-1)[: bucket.size]


#: Buckets of fewer bytes are exchanged whole between hosts, too, in one round in place of two.
_QUICK = 64 * 1024


def _across_hosts(buckets: list[jax.Array], axis_name: str, axis_size: int) -> list[jax.Array]:
    """Sum large buckets by XLA's own all-reduce, and exchange small ones.

    Gloo's ring uses both directions of a link at once. Its send and receive of an exchange do not: two hosts
    at 100 Mbit/s needed 157 ms for 1 MB, and 84 ms by the ring (the bound is 80), measured once by itself;
    `benchmarks/links.py` measures training.
    """
    large = [b for b in buckets if b.nbytes >= _QUICK]
    sums = iter(_xla(large, axis_name, axis_size) if large else ())
    return [next(sums) if b.nbytes >= _QUICK else _exchange([b], axis_name, axis_size)[0] for b in buckets]


#: The all-reduce algorithms; each compiles to another program.
ALGORITHMS: dict[str, Reducer] = {
    "xla": _xla,
    "ring": _each(_ring),
    "hierarchical": _each(_hierarchical),
    "one_device": _each(_one_device),
    "exchange": _exchange,
    "across_hosts": _across_hosts,
}


def all_reduce(
    tree: Tree,
    op: ReduceOp | ReduceOpName,
    *,
    axis_name: str,
    axis_size: int,
    algorithm: str = "xla",
    **rule: int,
) -> Tree:
    """Return the sum or mean of `tree` over the devices of a mesh axis, on each of them.

    Args:
        op: sum or mean, for `ReduceOp.parse`.
        algorithm: a key of `ALGORITHMS`.
        rule: by which arrays share a bucket, see `collectives._packing.plan`.

    Raises:
        InvalidArgumentError: for an unknown algorithm or `op`.
        InvalidTypeError: for booleans, and for the mean of integers.
    """
    if algorithm not in ALGORITHMS:
        raise InvalidArgumentError(
            f"`algorithm` must be one of {sorted(ALGORITHMS)}. Received: algorithm={algorithm!r}."
        )
    op = ReduceOp.parse(op)
    leaves, structure = jax.tree.flatten(tree)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    _check_types(leaves, op)
    # Else without a collective: the program of one device stays free of them.
    if axis_size > 1 and leaves:
        packing = plan([(leaf.shape, leaf.dtype) for leaf in leaves], **rule)
        leaves = _reduce(leaves, packing, ALGORITHMS[algorithm], axis_name, axis_size)
        if op is ReduceOp.MEAN:
            # After the sum, once: dividing before would round each replica's term.
            leaves = [(x / axis_size).astype(x.dtype) for x in leaves]
    reduced: Tree = jax.tree.unflatten(structure, leaves)
    return reduced


def _reduce(
    leaves: list[jax.Array], packing: PackingPlan, reducer: Reducer, axis_name: str, axis_size: int
) -> list[jax.Array]:
    """Sum with an algorithm, and define the derivative as the same sum of the cotangents.

    Without this rule, JAX would transpose each step of the algorithm, whatever that gives.
    """

    @jax.custom_vjp
    def summed(leaves: list[jax.Array]) -> list[jax.Array]:
        return unpack(reducer(pack(leaves, packing), axis_name, axis_size), packing)

    def forward(leaves: list[jax.Array]) -> tuple[list[jax.Array], None]:
        return summed(leaves), None

    def backward(_: None, cotangents: list[jax.Array]) -> tuple[list[jax.Array]]:
        # The cotangents of integers are of type float0, which no collective takes.
        floats = [c for c in cotangents if jnp.issubdtype(c.dtype, jnp.inexact)]
        own = plan([(c.shape, c.dtype) for c in floats]) if len(floats) < len(leaves) else packing
        sums = iter(unpack(reducer(pack(floats, own), axis_name, axis_size), own))
        return ([next(sums) if jnp.issubdtype(c.dtype, jnp.inexact) else c for c in cotangents],)

    summed.defvjp(forward, backward)
    return summed(leaves)


def _check_types(leaves: list[jax.Array], op: ReduceOp) -> None:
    for leaf in leaves:
        if leaf.dtype == jnp.bool_:
            raise InvalidTypeError(
                "Values to be summed over replicas must be numbers. Received: an array of type bool, shape "
                f"{leaf.shape}. Write `x.astype('int32')` before."
            )
        if op is ReduceOp.MEAN and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise InvalidTypeError(
                "Values to be averaged over replicas must be floats, because the mean of integers is not an "
                f"integer. Received: an array of type {leaf.dtype}, shape {leaf.shape}. Write "
                "`x.astype('float32')` before, or use the sum."
            )


def all_gather(x: jax.Array, axis: int, *, axis_name: str, axis_size: int) -> jax.Array:
    """Return the arrays of all devices concatenated along `axis`, in device order.

    Args:
        axis: the dimension to concatenate; negative numbers count from the last.

    Raises:
        InvalidArgumentError: for a scalar, or an `axis` out of range.
    """
    x = jnp.asarray(x)
    if x.ndim == 0:
        raise InvalidArgumentError(
            "Arrays to be gathered must have rank 1 or more. Received: a scalar. Write `x[None]`."
        )
    if not -x.ndim <= axis < x.ndim:
        raise InvalidArgumentError(
            f"`axis` must be a dimension of the array. Received: axis={axis}, shape={x.shape}. "
            f"Write a number from 0 to {x.ndim - 1}."
        )
    if axis_size == 1:
        return x
    at = axis % x.ndim

    @jax.custom_vjp
    def gathered(x: jax.Array) -> jax.Array:
        whole: jax.Array = lax.all_gather(x, axis_name, axis=at, tiled=True)
        return whole

    def forward(x: jax.Array) -> tuple[jax.Array, None]:
        return gathered(x), None

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        return (lax.platform_dependent(cotangent, cpu=part_of_sum, default=sum_of_parts),)

    def part_of_sum(cotangent: jax.Array) -> jax.Array:
        total = lax.psum(cotangent, axis_name)
        size = x.shape[at]
        part: jax.Array = lax.dynamic_slice_in_dim(total, lax.axis_index(axis_name) * size, size, at)
        return part

    def sum_of_parts(cotangent: jax.Array) -> jax.Array:
        part: jax.Array = lax.psum_scatter(cotangent, axis_name, scatter_dimension=at, tiled=True)
        return part

    gathered.defvjp(forward, backward)
    return gathered(x)
