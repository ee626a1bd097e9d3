"""Input that every worker makes for itself: successive elements for its own replicas.

Workers may have different numbers of elements, and the last may be short. At each step all agree
on the shapes that each replica has: one collective of 32 bytes where they are equal.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._mesh import ReplicaMesh
from unisono._values import PerReplica
from unisono.data._dataset import Dataset
from unisono.data._rewrite import (
    file_sharded,
    hint_sharded,
    shuffle_seeds,
    with_batches_divided,
    with_common_seed,
)
from unisono.data._sharding import AutoShardPolicy


def elements_of_workers(
    iterator: Iterator[Any],
    mesh: ReplicaMesh,
    are_alike: Callable[[bytes], bool],
    gather: Callable[[bytes], list[bytes]],
) -> Iterator[Any]:
    """Yield per-replica batches until no worker has an element left.

    Args:
        iterator: this worker's elements: pytrees of arrays with rows.
        mesh: all replicas.
        are_alike: whether all workers pass the same bytes.
        gather: the bytes of all workers.

    Yields:
        Structures of `PerReplica`; replicas without an element have arrays without rows.
    """
    here = len(mesh.local_replicas)
    structure: Any = None
    while True:
        row = [jax.tree.map(np.asarray, e) for e in itertools.islice(iterator, here)]
        if row:
            structure = jax.tree.structure(row[0])
        shapes = json.dumps([[(x.shape, str(x.dtype)) for x in jax.tree.leaves(e)] for e in row]).encode()
        if are_alike(shapes):
            if not row:
                return
            if len(row) == here and _equal_shapes(row):
                yield jax.tree.map(lambda *leaves: _global(leaves, mesh), *row)
                continue
        yield _ragged(row, structure, mesh, gather)


def pipeline_of_worker(
    dataset: Dataset,
    worker: tuple[int, int],
    from_chief: Callable[[Callable[[], bytes]], bytes],
    gather: Callable[[bytes], list[bytes]],
) -> Dataset:
    """Return the pipeline with which this worker makes the global batches.

    Args:
        dataset: the user's, the same on all workers.
        worker: the number of this worker, and how many there are.
        from_chief: gives what the first worker's function returns.
        gather: the bytes of all workers.

    Returns:
        By the policy: for AUTO and DATA a pipeline that shuffles alike on all workers, of whose
        batches each computes its own rows; for OFF the data set as it is; for FILE and HINT one
        that joins the batches which all workers read from their own files or shards.
    """
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA):
        seeds = shuffle_seeds(dataset, drawn=True)
        seed = from_chief(lambda: str(seeds[0] if seeds else 0).encode())
        return with_common_seed(dataset, int(seed))
    if policy is AutoShardPolicy.OFF:
        return dataset
    index, count = worker
    shard = file_sharded if policy is AutoShardPolicy.FILE else hint_sharded
    own = with_batches_divided(shard(dataset, count, index), count, index)
    return Dataset.from_generator(lambda: _joined_batches(own, gather))


def _joined_batches(dataset: Dataset, gather: Callable[[bytes], list[bytes]]) -> Iterator[Any]:
    """Yield the rows of all workers' next batches, until nobody has one."""
    structure: Any = None
    for_ever = itertools.chain(dataset, itertools.repeat(None))
    for batch in for_ever:
        if batch is not None:
            structure = jax.tree.structure(batch)
        own = [] if batch is None else [jax.tree.leaves(batch)]
        parts = [leaves for data in gather(_packed(own)) for leaves in _unpacked(data)]
        if not parts:
            return
        if structure is None:
            raise InvalidArgumentError(
                "Every worker must have at least one batch, or it does not know the structure of the "
                "others'. Received: a worker without any. Use fewer workers, or AutoShardPolicy.DATA."
            )
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        yield jax.tree.unflatten(structure, columns)


def _equal_shapes(row: list[Any]) -> bool:
    first = [x.shape for x in jax.tree.leaves(row[0])]
    return all([x.shape for x in jax.tree.leaves(e)] == first for e in row)


def _global(leaves: tuple[Any, ...], mesh: ReplicaMesh) -> PerReplica:
    """One array of all replicas from this worker's parts."""
    shape = (mesh.num_replicas, *leaves[0].shape)
    parts = [jax.device_put(x[None], d) for x, d in zip(leaves, mesh.local_devices, strict=True)]
    return PerReplica.from_stacked(jax.make_array_from_single_device_arrays(shape, mesh.sharded, parts))


def _ragged(row: list[Any], structure: Any, mesh: ReplicaMesh, gather: Callable[[bytes], list[bytes]]) -> Any:
    """Replicas of unequal size: every worker gets the rows of all, for they are traced in turn."""
    every: list[list[np.ndarray] | None] = []
    here = len(mesh.local_replicas)
    for data in gather(_packed([jax.tree.leaves(e) for e in row])):
        elements: list[Any] = list(_unpacked(data))
        every += elements + [None] * (here - len(elements))
    example = next(e for e in every if e is not None)
    if structure is None:
        raise InvalidArgumentError(
            "A worker must have at least one element, or it does not know the structure of the others'. "
            "Received: an input function that gave none. Give every worker at least one batch."
        )
    filled = [[x[:0] for x in example] if e is None else e for e in every]
    columns = [PerReplica(e[i] for e in filled) for i in range(len(example))]
    return jax.tree.unflatten(structure, columns)


def _packed(elements: list[list[np.ndarray]]) -> bytes:
    buffer = io.BytesIO()
    arrays = {f"{i}_{j}": x for i, leaves in enumerate(elements) for j, x in enumerate(leaves)}
    np.savez(buffer, **{"count": np.array(len(elements)), **arrays})  # type: ignore[arg-type]
    return buffer.getvalue()


def _unpacked(data: bytes) -> Iterator[list[np.ndarray]]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        for i in range(int(arrays["count"])):
            names = [n for n in arrays.files if n.startswith(f"{i}_")]
            yield [arrays[n] for n in sorted(names, key=lambda n: int(n.split("_")[1]))]
