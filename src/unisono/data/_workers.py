"""Input that every worker makes for itself: successive elements for its own replicas.

Workers may have different numbers of elements, and the last may be short. At each step all agree
on the shapes that each replica has: one collective of 32 bytes where they are equal.

Tests: tests/virtual/data/test_distribute.py, tests/cluster/test_contract.py.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._mesh import ReplicaMesh
from unisono._types import ArrayLike, PyTree
from unisono._values import PerReplica
from unisono.collectives._process_group import ProcessGroup
from unisono.data._batches import ENDED, as_array, check_values, owned
from unisono.data._dataset import Dataset
from unisono.data._pipeline._streams import Generator
from unisono.data._pipeline._structure import Element, TensorSpec, map_leaves
from unisono.data._rewrite import (
    file_sharded,
    hint_sharded,
    shuffle_seeds,
    with_batches_divided,
    with_common_seed,
)
from unisono.data._sharding import AutoShardPolicy


def elements_of_workers(
    iterator: Iterator[PyTree],
    mesh: ReplicaMesh,
    group: ProcessGroup,
) -> Iterator[PyTree]:
    """Yield per-replica batches until no worker has an element left."""
    here = len(mesh.local_replicas)
    structure: jax.tree_util.PyTreeDef | None = None
    while True:
        row = list(itertools.islice(iterator, here))
        row = [e if e is ENDED else _as_arrays(e) for e in row] + [ENDED] * (here - len(row))
        present = [e for e in row if e is not ENDED]
        if present:
            structure = jax.tree.structure(present[0])
        shapes = json.dumps([_shapes(e) for e in row]).encode()
        if mesh.processes_per_replica > 1:
            _require_same_rows(shapes, present, group)
        # Shapes alone are compared: rows are sent only where they differ.
        if group.are_alike(shapes):
            if not present:
                return
            if mesh.num_replicas == 1:
                yield jax.tree.map(lambda x: on_sole_replica(x, mesh), row[0])
                continue
            if len(present) == here and _equal_shapes(row):
                yield jax.tree.map(lambda *leaves: _global(leaves, mesh), *row)
                continue
        yield _ragged(row, structure, group.gather)


def on_sole_replica(value: ArrayLike, mesh: ReplicaMesh) -> jax.Array:
    """Return an array on the devices of the only replica, laid out as a step takes it."""
    array: jax.Array
    if mesh.spans_processes:
        array = jax.device_put(owned(value), mesh.place_of(0))  # each process has a copy of its own
    else:
        array = mesh.put(owned(value), mesh.replicated)
    return array


def _require_same_rows(shapes: bytes, elements: Sequence[PyTree], group: ProcessGroup) -> None:
    """Raise on all processes where two of one replica have other elements."""
    values = [np.ascontiguousarray(x).tobytes() for x in jax.tree.leaves(elements)]
    if not group.are_alike_in_replicas(b"".join([shapes, *values])):
        raise InvalidArgumentError(
            "All processes of a replica must make the same elements, for each has a part of the model. "
            "Received: elements of other shapes or values. Choose them by `context.input_pipeline_id`, which "
            "is the same for the processes of a replica, and seed what is drawn: `shuffle(1000, seed=1)`."
        )


def _as_arrays(element: PyTree) -> PyTree:
    arrays = jax.tree.map(lambda leaf: np.asarray(as_array(leaf)), element)
    check_values(arrays)
    return arrays


def _shapes(element: PyTree) -> list[tuple[tuple[int, ...], str]] | None:
    return None if element is ENDED else [(x.shape, str(x.dtype)) for x in jax.tree.leaves(element)]


def values_of_workers(values: Sequence[PyTree], mesh: ReplicaMesh, group: ProcessGroup) -> PyTree:
    """Return a per-replica value of what each worker has for its own replicas.

    Raises:
        InvalidTypeError: a value is of another type.
        InvalidArgumentError: replicas have values of different structures.
    """
    if group.size == 1:
        return jax.tree.map(lambda *leaves: PerReplica(leaves), *values)
    structure = jax.tree.structure(values[0])
    own = [[_sendable(leaf) for leaf in jax.tree.leaves(value)] for value in values]
    every = gathered(own, group)
    if len({len(leaves) for leaves in (*own, *every)}) > 1:
        raise InvalidArgumentError(
            "The values of all replicas must have one structure. Received: values with "
            f"{[len(leaves) for leaves in every]} parts. Return the same structure for each replica."
        )
    columns = []
    for mine, all_parts in zip(zip(*own, strict=True), zip(*every, strict=True), strict=True):
        if all_parts[0].dtype.kind in "SU":
            columns.append(PerReplica(part.item() if part.ndim == 0 else part for part in all_parts))
        elif len({(part.shape, part.dtype) for part in all_parts}) == 1:
            # The same on all processes of a replica.
            same = [all_parts[i] for i in mesh.local_replicas] if mesh.processes_per_replica > 1 else mine
            columns.append(_global(same, mesh))
        else:
            columns.append(PerReplica(all_parts))
    return jax.tree.unflatten(structure, columns)


def _sendable(value: object) -> np.ndarray:
    array = np.asarray(as_array(value))
    if array.dtype.kind not in "biufcSUV":
        raise InvalidTypeError(
            "On several workers, per-replica values must be arrays, numbers or strings. "
            f"Received: {value!r:.100} of type {type(value).__name__}. Return an array."
        )
    if array.dtype.kind not in "SU":
        check_values(array)
        # What JAX does where it places an array: the type must not depend on whether shapes are equal.
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    return array


def pipeline_of_worker(dataset: Dataset, group: ProcessGroup) -> Dataset:
    """Return the pipeline with which this worker makes the global batches.

    Returns:
        The dataset as it is where there is one worker. With several, by the policy: for AUTO and DATA a
        pipeline that shuffles alike on all workers, of whose batches each computes its own rows; for FILE
        and HINT a pipeline that joins the batches which all workers read from their own files or shards; for
        OFF likewise of the data as each has them.
    """
    if group.size == 1 and group.together > 1:
        # A single replica, of which each process makes all rows.
        return _shuffled_alike(dataset, group)
    return group.share_of(dataset, lambda _, count, i: _global_batches(dataset, count, i, group))


def _global_batches(dataset: Dataset, count: int, index: int, group: ProcessGroup) -> Dataset:
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA):
        return _shuffled_alike(dataset, group)
    if policy is AutoShardPolicy.OFF:
        own = with_batches_divided(dataset, count, index, at_least_one=True)
    else:
        shard = file_sharded if policy is AutoShardPolicy.FILE else hint_sharded
        own = with_batches_divided(shard(dataset, count, index), count, index)
    spec = functools.cache(lambda: map_leaves(_any_rows, own.element_spec))
    return own._derived(_JoinedBatches(lambda: joined_batches(own, group), own_spec=spec))


def shard_of_worker(dataset: Dataset, group: ProcessGroup) -> Dataset:
    """Return the pipeline of this worker's elements, where an element is a batch for one replica.

    Returns:
        By the policy: for AUTO and DATA every n-th element of a pipeline that shuffles alike on all n
        workers; for FILE the elements of this worker's files; for HINT of its shard; for OFF all of them.
    """
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy is AutoShardPolicy.OFF:
        return dataset
    if policy is AutoShardPolicy.FILE:
        return group.share_of(dataset, file_sharded)
    if policy is AutoShardPolicy.HINT:
        return group.share_of(dataset, hint_sharded)
    return group.share_of(
        dataset, lambda _, count, index: _shuffled_alike(dataset, group).shard(count, index)
    )


def _shuffled_alike(dataset: Dataset, group: ProcessGroup) -> Dataset:
    """Return the pipeline with the chief's seeds: each worker's own would give rows twice or never."""
    seeds = shuffle_seeds(dataset, drawn=True)
    seed = group.from_chief(lambda: str(seeds[0] if seeds else 0).encode())
    return with_common_seed(dataset, int(seed))


class _JoinedBatches(Generator, label="_Joined"):
    """Batches of all workers; to know their shapes, this worker's own are enough."""

    own_spec: Callable[[], Element] = dataclasses.field(kw_only=True)

    @property
    def spec(self) -> Element:
        return self.own_spec()


def _any_rows(spec: TensorSpec) -> TensorSpec:
    return spec if not spec.shape else TensorSpec((None, *spec.shape[1:]), spec.dtype)


def joined_batches(batches: Iterable[PyTree], group: ProcessGroup) -> Iterator[PyTree]:
    """Yield the rows of all workers' next batches, until none has one."""
    if group.size == 1:
        yield from batches
        return
    structure: jax.tree_util.PyTreeDef | None = None
    # A worker at its end sends empty messages until all have ended: the others would wait for it.
    for_ever = itertools.chain(batches, itertools.repeat(None))
    for batch in for_ever:
        if batch is not None:
            structure = jax.tree.structure(batch)
        own = [] if batch is None else [jax.tree.leaves(batch)]
        parts = gathered(own, group)
        if not parts:
            return
        if structure is None:
            raise InvalidArgumentError(
                "Every worker must have at least one batch, or it does not know the structure of the "
                "others'. Received: a worker without any. Use fewer workers, or AutoShardPolicy.DATA."
            )
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        yield jax.tree.unflatten(structure, columns)


def _equal_shapes(row: list[PyTree]) -> bool:
    first = [x.shape for x in jax.tree.leaves(row[0])]
    return all([x.shape for x in jax.tree.leaves(e)] == first for e in row)


def _global(leaves: Sequence[np.ndarray], mesh: ReplicaMesh) -> PerReplica:
    """Return one array of all replicas from this worker's parts."""
    shape, own = (mesh.num_replicas, *leaves[0].shape), dict(zip(mesh.local_replicas, leaves, strict=True))

    def row(index: tuple[slice, ...] | None) -> np.ndarray:
        # `start` is None where the only replica has the whole array.
        return own[(index[0].start or 0) if index else 0][None]

    stacked = jax.make_array_from_callback(shape, mesh.sharded, row)
    return PerReplica.from_stacked(stacked)


def _ragged(
    row: list[PyTree],
    structure: jax.tree_util.PyTreeDef | None,
    gather: Callable[[bytes], list[bytes]],
) -> PyTree:
    """Return a batch of replicas of unequal size, on every worker with the rows of all.

    Such replicas are traced in turn in one program, which needs them all.
    """
    own = [None if e is ENDED else jax.tree.leaves(e) for e in row]
    every = [element for data in gather(_packed(own)) for element in _unpacked(data)]
    example = next(e for e in every if e is not None)
    if structure is None:
        raise InvalidArgumentError(
            "A worker must have at least one element, or it does not know the structure of the others'. "
            "Received: an input function that gave none. Give every worker at least one batch."
        )
    filled = [[x[:0] for x in example] if e is None else e for e in every]
    columns = [PerReplica(e[i] for e in filled) for i in range(len(example))]
    return jax.tree.unflatten(structure, columns)


def _packed(elements: Sequence[Sequence[np.ndarray] | None]) -> bytes:
    """Return elements as bytes; None stands for a missing one."""
    # Not pickle, which runs code: the bytes go to other processes.
    buffer = io.BytesIO()
    counts = [-1 if leaves is None else len(leaves) for leaves in elements]
    arrays = [leaf for leaves in elements for leaf in leaves or ()]
    # With their names: of bfloat16 and its like NumPy writes only how many bytes they have.
    np.savez(buffer, np.array(counts, int), np.array([x.dtype.name for x in arrays], str), *arrays)
    return buffer.getvalue()


def gathered(own: Sequence[Sequence[np.ndarray]], group: ProcessGroup) -> list[list[np.ndarray]]:
    """Return the elements of all workers, without those that are missing."""
    return [leaves for data in group.gather(_packed(own)) for leaves in _unpacked(data) if leaves is not None]


def _unpacked(data: bytes) -> Iterator[list[np.ndarray] | None]:
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        counts, names, *arrays = (file[name] for name in file.files)
    named = zip(arrays, names.tolist(), strict=True)
    leaves = (x.view(name) if x.dtype.kind == "V" else x for x, name in named)
    for count in counts.tolist():
        yield None if count < 0 else list(itertools.islice(leaves, count))
