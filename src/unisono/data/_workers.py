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
