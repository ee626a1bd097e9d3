"""Steps of a `model_fn` in groups: one program runs as many as pay, without a word from the host between.

Tests: tests/virtual/estimator/test_train.py, tests/virtual/estimator/test_counts.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from unisono._types import PyTree
from unisono.estimator.session._input import Row
from unisono.estimator.session._model_step import ModelStep
from unisono.estimator.session._programs import PlacedArrays, Programs
from unisono.training._bind import install
from unisono.training.trainer._batch_placement import BatchStager
from unisono.training.trainer._multi_step import AdaptiveGroupSize, StepLog, slots_for

if TYPE_CHECKING:
    from unisono.strategies._replicated import ReplicatedStrategy


class RowStager(BatchStager):
    """Collects rows of elements, of which this process has its replicas' only."""

    def append(self, batch: PyTree) -> None:
        """Copy a row behind the others.

        Args:
            batch: pytree of arrays with a leading axis of this process' replicas.
        """
        for buffers, array in zip(self._buffers, jax.tree.leaves(batch), strict=True):
            for part, buffer in zip(array, buffers.values(), strict=True):
                buffer[self.count, 0] = part
        self.count += 1


class StepRunner:
    """Runs the steps of one mode of a model_fn.

    Args:
        strategy: on whose replicas.
        step: of one replica.
        rows: the data.
    """

    def __init__(self, strategy: ReplicatedStrategy, step: ModelStep, rows: Iterator[Row]) -> None:
        # Without a scope nothing else does it.
        install()
        self._strategy, self._step, self._rows = strategy, step, rows
        self._programs = Programs(strategy)
        self._stagers: dict[Hashable, RowStager] = {}
        self._pace = AdaptiveGroupSize()
        #: A row that was taken, and did not fit into the group before it.
        self._kept: Row | None = None

    @property
    def num_programs(self) -> int:
        """How many programs were compiled."""
        return len(self._programs)

    def create_variables(self) -> bool:
        """Trace the step with the first elements, so that its variables are made; False without data."""
        row = self._take()
        if row is None:
            return False
        self._kept = row
        self._programs.create_variables(self._step.create, row.batch, row.is_whole)
        return True

    def run(
        self, most: int, names: Iterable[str], losses: list[tuple[int, Any]] | None = None
    ) -> tuple[int, Mapping[str, Any]]:
        """Run some steps; fewer at the end of the data.

        Args:
            most: how many.
            names: of the values that are needed of the last step, besides numbers.
            losses: gets, for each program, the number of its steps and the array of their losses.

        Returns:
            How many have run, and the last one's values by name, which may lie on devices.
        """
        extra = frozenset(names) - self._step.scalars
        done, values = 0, {}
        while done < most:
            # Arrays are returned by a program of their own, of the last step alone.
            alone = bool(extra) and done == most - 1
            room = 1 if alone else most - done - bool(extra)
            count, found = self._run_group(room, extra if alone else frozenset())
            if not count:
                break
            if losses is not None:
                losses.append((count, found["loss"]))
            done += count
            values = {name: StepLog(every, count - 1) for name, every in found.items()}
        return done, values

    def _run_group(self, room: int, extra: frozenset[str]) -> tuple[int, Mapping[str, jax.Array]]:
        """Run the next program; return how many steps it had, and their values."""
        began = perf_counter()
        first = self._take()
        if first is None:
            return 0, {}
        slots = 1 if extra else self._slots(first)
        names = self._step.scalars | extra
        step = self._step.returning(names)
        program = self._programs(step, names, first.batch, slots, first.is_whole)
        if first.is_whole:
            count, arrays = 1, self._whole(first.batch)
        else:
            count, arrays = self._staged(first, slots, min(room, self._pace.size, slots))
        found = program(PlacedArrays(arrays))
        self._pace.wait_for_capacity(list(found.values()), count, perf_counter() - began)
        return count, found

    def _slots(self, row: Row) -> int:
        """Return how many rows like this one a program has room for."""
        if row.is_whole or not self._strategy.runs_ahead:
            return 1
        return slots_for(row.batch)

    def _staged(self, first: Row, slots: int, size: int) -> tuple[int, list[Any]]:
        """Return rows on the devices, with their number; those that follow the first, if they fit."""
        leaves, structure = jax.tree.flatten(first.batch)
        key = (slots, structure, tuple((x.shape, x.dtype) for x in leaves))
        if key not in self._stagers:
            shapes = [(self._strategy.num_replicas_in_sync, *x.shape[1:]) for x in leaves]
            like = [np.broadcast_to(x[0], shape) for x, shape in zip(leaves, shapes, strict=True)]
            self._stagers[key] = RowStager(self._strategy.mesh, jax.tree.unflatten(structure, like), slots)
        stager = self._stagers[key]
        stager.begin()
        stager.append(first.batch)
        while stager.count < size and (row := self._take()) is not None:
            if not first.fits(row):
                self._kept = row
                break
            stager.append(row.batch)
        count, batches = stager.place()
        return stager.count, [count, *jax.tree.leaves(batches)]

    def _whole(self, batch: PyTree) -> list[Any]:
        """Return a batch on every device."""
        mesh = self._strategy.mesh
        arrays = mesh.put([x[None] for x in jax.tree.leaves(batch)], mesh.replicated)
        return [mesh.put(np.int32(1), mesh.replicated), *arrays]

    def _take(self) -> Row | None:
        """Return the next row; None at the end of the data."""
        kept, self._kept = self._kept, None
        return kept if kept is not None else next(self._rows, None)
