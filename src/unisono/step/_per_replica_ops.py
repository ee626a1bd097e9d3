"""Per-replica values outside the replicas: reducing, joining, taking apart.

Tests: tests/virtual/strategies/test_contract.py.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import creator_of
from unisono._errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from unisono._mesh import ReplicaMesh
from unisono._types import ArrayLike, PyTree
from unisono._values import IndexedSlices, PerReplica, ReduceOp
from unisono.collectives._process_group import ProcessGroup
from unisono.step._run_ahead import run_ahead_of

Axis = int | Sequence[int] | None


def reduce(op: ReduceOp, value: PyTree, axis: Axis, mesh: ReplicaMesh, group: ProcessGroup) -> PyTree:
    """Combine one per-replica value; see `Strategy.reduce`."""
    if isinstance(value, IndexedSlices):
        return _reduce_rows(op, value, axis, mesh, group)
    if not isinstance(value, PerReplica):
        return _reduce_single(op, value, axis, mesh, group)
    if value.stacked is not None:
        axes = None if axis is None else _axes(axis, value.stacked.shape[1:])
        if _is_in_parts(value.stacked):
            # Compiled with a layout: each process then holds the result, and not only its part.
            reducer = jax.jit(_reduce_stacked, static_argnums=(1, 2), out_shardings=mesh.replicated)
            return mesh.local(_bounded(reducer(value.stacked, op, axes), mesh, group))
        return _bounded(_reduce_stacked(value.stacked, op, axes), mesh, group)
    values = [jnp.asarray(v) for v in value.values]
    axes = None
    if axis is not None:
        for one in values:
            axes = _axes(axis, one.shape)
    if axes is None and len({v.shape for v in values}) > 1:
        raise InvalidArgumentError(
            "Replicas must hold equal shapes to be reduced element by element. Received: shapes "
            f"{[v.shape for v in values]} with axis=None. Write `axis=0` to reduce the rows too."
        )
    values = _together(values, mesh)
    if axes is None:
        return mesh.local(_bounded(_reduce_stacked(jnp.stack(values), op, axes), mesh, group))
    return mesh.local(_bounded(_reduce_ragged(values, op, axes), mesh, group))


def _reduce_rows(
    op: ReduceOp, slices: IndexedSlices, axis: Axis, mesh: ReplicaMesh, group: ProcessGroup
) -> IndexedSlices:
    """The sum of sparse rows: the rows of all replicas, one after the other."""
    if axis is not None:
        raise InvalidArgumentError(
            f"Sparse rows can be reduced with `axis=None` only. Received: axis={axis!r} and {slices!r}."
        )
    if not isinstance(slices.values, PerReplica):
        return slices
    values, indices = (gather(part, 0, mesh, group) for part in (slices.values, slices.indices))
    if op is ReduceOp.MEAN:
        values = values / mesh.num_replicas
    return IndexedSlices(values, indices, slices.dense_shape)


def _reduce_single(
    op: ReduceOp, value: PyTree, axis: Axis, mesh: ReplicaMesh, group: ProcessGroup
) -> ArrayLike:
    """A value that is the same everywhere; TensorFlow refuses its sum, which is likely a mistake."""
    # A host's zero is not worth an error; a device array is not read to find out.
    is_zero = isinstance(value, (int, float, np.generic, np.ndarray)) and not np.any(value)
    if op is ReduceOp.SUM and mesh.num_replicas > 1 and not is_zero:
        workers = " `strategy.extended.reduce_to('SUM', value, None)` adds up one value of each worker."
        raise InvalidArgumentError(
            "Only a per-replica value can be summed over the replicas. Received: "
            f"{type(value).__name__} {value!r}. Pass what `strategy.run` returned, where steps return arrays "
            "(a Python number is the same on all replicas), or use 'MEAN'."
            + (workers if group.size > 1 else "")
        )
    if axis is None:
        return value
    axes = _axes(axis, np.shape(value))
    return jnp.sum(value, axis=axes) if op is ReduceOp.SUM else jnp.mean(value, axis=axes)


def _is_in_parts(array: object) -> bool:
    """Return whether this process has the values of its own replicas alone."""
    return (
        isinstance(array, jax.Array)
        and not isinstance(array, jax.core.Tracer)
        and not array.is_fully_addressable
    )


def _axes(axis: int | Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Dimensions of a replica's array, counted from 0.

    Raises:
        InvalidTypeError: for what is not an integer, or several of them.
        InvalidArgumentError: for a dimension that the array does not have, or one named twice.

    >>> _axes((0, -1), (4, 5, 6))
    (0, 2)
    """
    try:
        several: Sequence[SupportsIndex] = axis if isinstance(axis, (tuple, list)) else (axis,)
        given = [operator.index(a) for a in several]
    except TypeError:
        raise InvalidTypeError(
            f"`axis` must be None, an integer or a tuple of integers. Received: axis={axis!r}. "
            "Write `axis=0` for the rows of each replica, or `axis=None` for none of its dimensions."
        ) from None
    rank = len(shape)
    found = tuple(a + rank if a < 0 else a for a in given)
    if any(not 0 <= a < rank for a in found) or len(set(found)) < len(found):
        raise InvalidArgumentError(
            "`axis` must name dimensions of one replica's array, each once. "
            f"Received: axis={axis!r} for an array of shape {tuple(shape)}. "
            + (f"Its dimensions are {tuple(range(rank))}." if rank else "Write `axis=None` for scalars.")
        )
    return found


@functools.partial(jax.jit, static_argnums=(1, 2))
def _reduce_stacked(stacked: jax.Array, op: ReduceOp, axes: tuple[int, ...] | None) -> jax.Array:
    over = (0, *(1 + a for a in axes or ()))
    return jnp.sum(stacked, axis=over) if op is ReduceOp.SUM else jnp.mean(stacked, axis=over)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _reduce_ragged(values: list[jax.Array], op: ReduceOp, axes: tuple[int, ...]) -> jax.Array:
    sums = [jnp.sum(v, axis=axes) for v in values]
    total = sum(sums[1:], sums[0])
    if op is ReduceOp.SUM:
        return total
    # By elements and not by replicas, as in TensorFlow: the mean of uneven parts is that of all rows.
    count = sum(functools.reduce(lambda n, a: n * v.shape[a], axes, 1) for v in values)
    return total / count


def gather(value: PyTree, axis: int, mesh: ReplicaMesh, group: ProcessGroup) -> PyTree:
    """Concatenate one per-replica value; see `Strategy.gather`."""
    if isinstance(value, IndexedSlices):
        raise UnsupportedError(
            "`gather` joins arrays. Received: IndexedSlices. Use `strategy.reduce('SUM', value, axis=None)`, "
            "which joins the rows of all replicas."
        )
    if not isinstance(value, PerReplica):
        return value
    stacked = value.stacked
    if stacked is not None and _is_in_parts(stacked):
        # Every process gets the values of all replicas, not of its own alone.
        value = PerReplica(np.asarray(mesh.put(stacked, mesh.replicated)))
    values = [jnp.asarray(v) for v in value.values]
    shapes = [v.shape for v in values]
    if not shapes[0]:
        raise InvalidArgumentError(
            "Only arrays of rank 1 or more can be joined. Received: scalars. Use `strategy.reduce`, or "
            "return `x[None]` from the step."
        )
    if not isinstance(axis, (int, np.integer)):
        raise InvalidTypeError(f"`axis` must be an integer. Received: axis={axis!r}. Write `axis=0`.")
    (at,) = _axes(axis, shapes[0])
    if len({len(s) for s in shapes}) > 1 or len({s[:at] + s[at + 1 :] for s in shapes}) > 1:
        raise InvalidArgumentError(
            f"Shapes must be equal on all dimensions but axis={axis} to be joined. Received: {shapes}. "
            "Gather along the dimension in which they differ."
        )
    return mesh.local(_bounded(jnp.concatenate(_together(values, mesh), axis=at), mesh, group))


def local_results(value: PyTree, mesh: ReplicaMesh) -> tuple[Any, ...]:
    """Take a per-replica value, or a structure of them, apart; see `Strategy.local_results`."""
    if isinstance(value, keras.Variable) and mesh.num_replicas > 1:
        return _copies_of(value, mesh)
    leaves, structure = jax.tree.flatten(value, is_leaf=lambda leaf: isinstance(leaf, PerReplica))
    split = [leaf for leaf in leaves if isinstance(leaf, PerReplica)]
    if not split:
        return (value,)
    count = len(_local(split[0], mesh))
    parts = [_local(leaf, mesh) if isinstance(leaf, PerReplica) else (leaf,) * count for leaf in leaves]
    return tuple(jax.tree.unflatten(structure, row) for row in zip(*parts, strict=True))


def _copies_of(variable: keras.Variable, mesh: ReplicaMesh) -> tuple[Any, ...]:
    """The copy of a variable of each of this process' replicas; of another variable, itself."""
    # As in TensorFlow: a variable of no strategy is a single value.
    if creator_of(variable) is None:
        return (variable,)
    copies = getattr(variable, "stored_copies", None)
    if copies is not None:
        return _local(PerReplica.from_stacked(copies), mesh)
    return mesh.copies(variable.value)


def _local(value: PerReplica, mesh: ReplicaMesh) -> tuple[Any, ...]:
    """The values of this process' replicas."""
    values = value.values
    if len(values) == mesh.num_replicas:
        # Replicas of unequal shapes are traced in turn: every process holds the values of all.
        return tuple(values[i] for i in mesh.local_replicas)
    return values


def _together(values: list[jax.Array], mesh: ReplicaMesh) -> list[jax.Array]:
    """Values of several devices where one program can see them all."""
    if any(isinstance(v, jax.core.Tracer) for v in values):
        return values
    return [mesh.put(v, mesh.replicated) for v in values]


def _bounded(result: PyTree, mesh: ReplicaMesh, group: ProcessGroup) -> PyTree:
    """Count a result as a step, so that the host cannot run away from the devices."""
    if not isinstance(result, jax.core.Tracer):
        group.step_started(result)
        run_ahead_of(mesh).wait_for_capacity(result)
    return result
