"""Batches that one program runs: one alone, or several of one shape.

`steps_per_execution=K` and the steps that run ahead of Keras' loop are two sizes of the same group.

Tests: tests/virtual/training/test_lookahead.py, tests/virtual/training/test_counts.py.
"""

from __future__ import annotations

import jax

from unisono._mesh import ReplicaMesh
from unisono._types import PyTree
from unisono.training.trainer._batch_placement import BatchPlacer, BatchStager
from unisono.training.trainer._batch_policy import Mode, pad_rows
from unisono.training.trainer._step_programs import ProgramKey


class BatchGroup:
    """What one program runs.

    Args:
        first: the first batch; pytree of host arrays.
        mode: how its rows reach the replicas, and those of all others.
        rows: how many it has.
        stager: collects the batches; None for one that runs alone. A group whose program cannot have a
            loop gives it up before it runs.
    """

    def __init__(self, first: PyTree, mode: Mode, rows: int, stager: BatchStager | None = None) -> None:
        self.first, self.mode, self.rows, self.stager = first, mode, rows, stager
        #: How many batches there are. The stager's own count is that of its last group.
        self.count = 1
        #: The batches, as long as the steps may have to run again.
        self.batches: list[PyTree] = [first]
        #: Seconds that it took to get and stage the batches after the first.
        self.seconds = 0.0
        if stager is not None:
            stager.begin()
            stager.append(first)

    def key(self, sizes: tuple[int, ...], keeps_state: bool = False) -> ProgramKey:
        """Return what names the program.

        Args:
            sizes: how many variables each part of the state has.
            keeps_state: whether the state that the program is given can be used again.
        """
        true_rows = self.rows if self.mode is Mode.PADDED else 0
        slots = 1 if self.stager is None else self.stager.slots
        return ProgramKey(self.mode, true_rows, slots, sizes, keeps_state)


class GroupPlacer:
    """Puts groups onto the devices.

    Args:
        mesh: the devices.
    """

    def __init__(self, mesh: ReplicaMesh) -> None:
        self._num_replicas = mesh.num_replicas
        split = BatchPlacer(mesh, mesh.sharded)
        self._placers = {
            Mode.SPLIT: split,
            Mode.PADDED: split,
            Mode.WHOLE: BatchPlacer(mesh, mesh.replicated),
        }

    def __call__(self, group: BatchGroup) -> PyTree:
        """Return the batch of a group; the number of batches and the batches where it is staged."""
        if group.stager is not None:
            return group.stager.place()
        batch = group.first
        if group.mode is Mode.PADDED:
            batch = jax.tree.map(lambda x: pad_rows(x, self._num_replicas), batch)
        return self._placers[group.mode](batch)
