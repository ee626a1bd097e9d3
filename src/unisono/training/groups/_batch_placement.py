"""Groups of batches that one program runs, and their way to the devices.

`steps_per_execution=K` and the steps that run ahead of Keras' loop are two sizes of the same group.

Tests: tests/virtual/training/test_overlap.py, tests/virtual/training/test_lookahead.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

import jax
import numpy as np

from unisono._mesh import ReplicaMesh
from unisono._types import PyTree
from unisono.step._run_ahead import RUN_AHEAD
from unisono.training.groups._batch_policy import Mode, pad_rows
from unisono.training.groups._step_profile import HostTimer

if TYPE_CHECKING:
    from unisono.training.resident._arrays import RowChoice

#: XLA's CPU client uses a NumPy buffer without a copy when it is aligned to this many bytes.
_ALIGNMENT = 64

#: Larger arrays are placed by JAX; keeping buffers for every step in flight would cost too much.
_LARGEST = 4 << 20

#: One buffer for every step that may be in flight, the one being filled, and one to spare.
_SLOTS = RUN_AHEAD + 2

#: Buffers for two programs in flight, and for the one whose batches are being collected.
_GROUPS = 3


#: Which part of an array a device holds: a slice for each dimension.
Index: TypeAlias = tuple[slice, ...] | None


class BatchPlacer:
    """Places batches on the devices of a sharding.

    On CPU devices each array is copied into one of a ring of aligned buffers, which XLA reads in
    place: a third of the time of `jax.device_put`. A buffer is written again only after `RUN_AHEAD` later
    steps were started, so after its own step is done. Everything else JAX reads when it has the time, also
    after this call: nothing may write into it, see `data._batches.owned`.

    Where devices of several processes compute, every process holds the global batch and places
    its own devices' part.
    """

    def __init__(self, mesh: ReplicaMesh, sharding: jax.sharding.NamedSharding) -> None:
        self._mesh = mesh
        self._sharding = sharding
        self._is_cpu = mesh.platform == "cpu"
        self._is_single = sharding.num_devices == 1
        self._rings: dict[tuple[int, tuple[int, ...], np.dtype], itertools.cycle[np.ndarray]] = {}

    def __call__(self, batch: PyTree) -> PyTree:
        """Return `batch` on the devices; leave None as it is."""
        if not self._is_cpu:
            return self._mesh.put(batch, self._sharding)
        if self._is_single:
            return batch  # `jax.jit` takes NumPy arrays itself, and to one device it does so fastest
        leaves, structure = jax.tree.flatten(batch)
        return jax.tree.unflatten(structure, [self._place(i, x) for i, x in enumerate(leaves)])

    def _place(self, position: int, array: np.ndarray | jax.Array) -> jax.Array:
        if isinstance(array, jax.Array) or not 0 < array.nbytes <= _LARGEST:
            placed: jax.Array = self._mesh.put(array, self._sharding)
            return placed
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        key = (position, array.shape, dtype)
        if key not in self._rings:
            buffers = [_aligned(array.shape, dtype) for _ in range(_SLOTS)]
            self._rings[key] = itertools.cycle(buffers)
        buffer = next(self._rings[key])
        np.copyto(buffer, array, casting="unsafe")
        return jax.make_array_from_callback(array.shape, self._sharding, lambda index: buffer[index])


class BatchStager:
    """Places several batches on the devices as one array, split along its second dimension.

    Each batch is copied when it is taken, so that the source may reuse its own buffer, into buffers
    that XLA reads in place. They are written again two programs later: who starts a program must wait
    for the last but one first, as `AdaptiveGroupSize.wait_for_capacity` does.

    Args:
        batch: the first batch; pytree of NumPy arrays.
    """

    def __init__(self, mesh: ReplicaMesh, batch: PyTree, slots: int) -> None:
        self._mesh = mesh
        leaves, structure = jax.tree.flatten(batch)
        self._structure: Hashable = structure
        self.slots = slots
        self.rows = leaves[0].shape[0]
        shapes = [(slots, -(-self.rows // mesh.num_replicas), *x.shape[1:]) for x in leaves]
        dtypes = [jax.dtypes.canonicalize_dtype(x.dtype) for x in leaves]
        self._like = [(x.shape, x.dtype) for x in leaves]
        rings = [
            [
                {r: _aligned(shape, dtype) for r in mesh.local_replicas}
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            for _ in range(_GROUPS)
        ]
        self._rings = itertools.cycle(rings)
        self._buffers = rings[0]
        self._counts: dict[int, jax.Array] = {}
        self.count = 0
        #: True if no program reads the buffers of the last group.
        self.is_unread = False

    def begin(self) -> None:
        """Turn to the next buffers, unless no program reads the last ones."""
        if not self.is_unread:
            self._buffers = next(self._rings)
        self.count, self.is_unread = 0, False

    def fits(self, batch: PyTree) -> bool:
        """Return whether a batch has the structure, shapes and types of the first one."""
        leaves, structure = jax.tree.flatten(batch)
        return bool(self._structure == structure) and all(
            isinstance(x, (np.ndarray, jax.Array)) and (x.shape, x.dtype) == like
            for x, like in zip(leaves, self._like, strict=True)
        )

    def append(self, batch: PyTree) -> None:
        """Copy a batch behind the others, filled up where it does not divide."""
        for buffers, array in zip(self._buffers, map(np.asarray, jax.tree.leaves(batch)), strict=True):
            for replica, buffer in buffers.items():
                rows = buffer.shape[1]
                part = array[replica * rows : (replica + 1) * rows]
                buffer[self.count, : len(part)] = part
                # Copies of a true row, as in `pad_rows`.
                buffer[self.count, len(part) :] = array[-1]
        self.count += 1

    def place(self) -> tuple[jax.Array, PyTree]:
        """Return how many batches there are, and the batches on the devices."""
        batches = jax.tree.unflatten(self._structure, [self._place(b) for b in self._buffers])
        return self.number(self.count), batches

    def number(self, count: int) -> jax.Array:
        """Return a number of batches on the devices."""
        if count not in self._counts:
            self._counts[count] = self._mesh.put(np.int32(count), self._mesh.replicated)
        return self._counts[count]

    def _place(self, buffers: dict[int, np.ndarray]) -> jax.Array:
        first = next(iter(buffers.values()))
        rows, replicas = first.shape[1], self._mesh.num_replicas
        shape = (self.slots, rows * replicas, *first.shape[2:])

        def part(index: Index) -> np.ndarray:
            start = index[1].start if index else 0
            return buffers[(start or 0) // rows]

        return jax.make_array_from_callback(shape, self._mesh.scanned, part)


class StagerCache:
    """The stagers of one function: one for each form of batches, and number of slots."""

    def __init__(self, mesh: ReplicaMesh, kind: type[BatchStager] = BatchStager) -> None:
        self._mesh, self._kind = mesh, kind
        self._stagers: dict[Hashable, BatchStager] = {}

    def get(self, batch: PyTree, slots: int) -> BatchStager:
        """Return the stager for batches like one.

        Args:
            batch: pytree of arrays with the rows of all replicas, of which only the form counts.
        """
        choice: RowChoice | None = getattr(jax.tree.leaves(batch)[0], "choice", None)
        key = slots, choice is None, form_of(batch)
        if key not in self._stagers:
            make = self._kind if choice is None else choice.stager
            self._stagers[key] = make(self._mesh, batch, slots)
        return self._stagers[key]


class BatchGroup:
    """What one program runs.

    Args:
        first: the first batch; pytree of host arrays.
        mode: how its rows reach the replicas, and those of all others.
        stager: collects the batches; None for one that runs alone. A group whose program cannot have a
            loop gives it up before it runs.
        keeps_state: whether the state that the program is given can be used again.
        holds: whether its batches may be given back before it runs.
    """

    def __init__(
        self,
        first: PyTree,
        mode: Mode,
        rows: int,
        stager: BatchStager | None = None,
        keeps_state: bool = False,
        holds: bool = False,
    ) -> None:
        self._holds = keeps_state or holds
        self.first, self.mode, self.rows, self.stager = first, mode, rows, stager
        self.keeps_state = keeps_state
        #: The numbers of its rows; None where the batch holds these itself.
        self.choice: RowChoice | None = getattr(next(iter(jax.tree.leaves(first)), None), "choice", None)
        #: How many batches there are. The stager's own count is that of its last group.
        self.count = 1
        #: The batches, as long as the steps may have to run again.
        self.batches: list[PyTree] = [first]
        #: Seconds that it took to get and stage the batches after the first.
        self.seconds = 0.0
        if stager is not None:
            stager.begin()
            stager.append(first)

    @property
    def slots(self) -> int:
        """How many batches the program has room for."""
        return 1 if self.stager is None else self.stager.slots

    @property
    def form(self) -> tuple[Mode, int, int, bool]:
        """What distinguishes its program from those of other groups."""
        return self.mode, self.rows, self.slots, self.keeps_state

    def fill(self, batches: Iterable[PyTree], timer: HostTimer) -> None:
        """Stage the batches that follow the first, each before the next is made."""
        if self.stager is None:
            return
        began = perf_counter()
        for batch in batches:
            taken = perf_counter()
            self.stager.append(batch)
            timer.placing += perf_counter() - taken
            self.count += 1
            if self._holds:
                self.batches.append(batch)
        self.seconds = perf_counter() - began


class GroupPlacer:
    """Puts groups onto the devices."""

    def __init__(self, mesh: ReplicaMesh) -> None:
        self._num_replicas = mesh.num_replicas
        self._split, self._whole = BatchPlacer(mesh, mesh.sharded), BatchPlacer(mesh, mesh.replicated)

    def __call__(self, group: BatchGroup) -> PyTree:
        """Return the batch of a group; the number of batches and the batches where it is staged."""
        if group.stager is not None:
            return group.stager.place()
        batch = group.first if group.choice is None else group.choice.numbers
        if group.mode is Mode.PADDED:
            batch = jax.tree.map(lambda x: pad_rows(x, self._num_replicas), batch)
        placed = self._whole(batch) if group.mode is Mode.WHOLE else self._split(batch)
        return placed if group.choice is None else group.choice.with_arrays(placed)


def form_of(batch: PyTree) -> Hashable:
    """Return structure, shapes and types of a batch of arrays."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((x.shape, x.dtype) for x in leaves)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialized array whose memory begins at a multiple of `_ALIGNMENT` bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    aligned: np.ndarray = raw[start : start + size].view(dtype).reshape(shape)
    return aligned
