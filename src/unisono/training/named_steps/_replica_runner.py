"""Named steps in groups: one program runs as many as pay, without a word from the host between.

Tests: tests/virtual/estimator/test_train.py, tests/virtual/estimator/test_counts.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from unisono._lowering._compiler_options import Executables
from unisono._types import PyTree
from unisono.step._call_signature import Call
from unisono.step._run_ahead import run_ahead_of
from unisono.training._bind import wrap_keras
from unisono.training.groups._batch_placement import BatchStager, StagerCache
from unisono.training.groups._group_size import AdaptiveGroupSize
from unisono.training.groups._multi_step import LazyArray, is_slow_in_loop, may_loop, slots_for
from unisono.training.named_steps._programs import Programs
from unisono.training.named_steps._protocol import ElementSource, NamedStep, Result, elements_for
from unisono.training.named_steps._rows import Row, RowSource, rows_of
from unisono.training.stateful._grouped_program import GroupEntry

if TYPE_CHECKING:
    from unisono.strategies._replicated import ReplicatedStrategy
    from unisono.training.groups._constant_groups import Preparation
    from unisono.training.named_steps._constant_rows import ConstantRows


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


class ReplicaStepRunner:
    """Runs named steps on the replicas of this process and its group."""

    def __init__(
        self,
        strategy: ReplicatedStrategy,
        step: NamedStep,
        source: ElementSource,
        executables: Executables | None = None,
    ) -> None:
        # Without a scope nothing else does it.
        wrap_keras()
        self._strategy, self._step, self._executables = strategy, step, executables
        #: Whether a program may repeat the step in a loop; None until the first such program is traced.
        self._can_loop = may_loop(strategy.mesh.platform)
        self._programs = Programs(strategy._replicas, executables, is_constant=self._can_loop is False)
        self._stagers = StagerCache(strategy.mesh, RowStager)
        self._pace = AdaptiveGroupSize(platform=strategy.mesh.platform)
        #: Takes groups where a loop must have a constant length; None elsewhere.
        self._constant: ConstantRows | None = None
        if self._can_loop is False and strategy._runs_ahead:
            from unisono.training.named_steps._constant_rows import ConstantRows

            self._constant = ConstantRows(strategy.process_group, run_ahead_of(strategy.mesh), executables)
        readers = strategy._input_group
        rows = rows_of(elements_for(strategy, source, readers), len(strategy.mesh.local_replicas))
        self._source = RowSource(rows, strategy.process_group, step.shared_errors, readers)

    @property
    def num_programs(self) -> int:
        """How many programs were compiled."""
        return len(self._programs)

    @contextlib.contextmanager
    def around_training(self) -> Iterator[None]:
        """Surround all steps of a training."""
        yield

    def create_variables(self) -> bool:
        """Trace the step with the first elements, so that its variables are made; False without data."""
        row = self._source.peek()
        if row is None:
            return False
        self._programs.create_variables(self._step.create, row.batch, row.is_whole)
        return True

    def run(
        self, most: int, names: Iterable[str], losses: list[tuple[int, jax.Array]] | None = None
    ) -> tuple[int, Mapping[str, Any]]:
        """Run some steps, and return how many and the last one's values; see `StepRunner.run`."""
        extra = frozenset(names) - self._step.scalars
        if self._constant is not None:
            self._constant.begin_call(most - bool(extra))
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
            values = {n: LazyArray.of_step(x, count - 1) for n, x in found.items()}
        return done, values

    def _run_group(self, room: int, extra: frozenset[str]) -> tuple[int, Mapping[str, jax.Array]]:
        """Run the next program; return how many steps it had, and their values."""
        began, constant = perf_counter(), self._constant
        rows, extra = self._source.take(lambda row: self._wanted(row, room, extra), extra)
        if not rows:
            return 0, {}
        if constant is not None:
            rows = constant.complete(rows, self._source)
        slots = self._slots(rows[0], extra) if constant is None else len(rows)
        program, call = self._program(rows, extra, slots)
        if constant is not None and slots == 1 and not extra and not rows[0].is_whole:
            constant.note_alone(
                rows[0], self._room_for(rows[0]), _kind_of(program), partial(self._prepare, rows)
            )
        if slots > 1 and self._can_loop is None:
            # The first group has one row, which a program without a loop can take.
            jaxpr = program.step.jaxpr(*program.arguments(call))
            self._can_loop = not is_slow_in_loop(jaxpr, self._strategy.mesh.platform)
            if not self._can_loop:
                self._programs.remove(program)
                program, call = self._program(rows, extra, 1)
        found: Mapping[str, jax.Array] = program(call)
        newest = run_ahead_of(self._strategy.mesh).newest
        self._pace.wait_for_capacity(newest, len(rows), perf_counter() - began)
        if constant is not None:
            constant.note_started()
        return len(rows), found

    def _wanted(self, row: Row, room: int, extra: frozenset[str]) -> int:
        """Return how many rows the next program should take."""
        if self._constant is None:
            return min(room, self._pace.size, self._slots(row, extra))
        return 1 if extra else self._constant.wanted(row, room)

    def _prepare(self, rows: Sequence[Row], length: int) -> Preparation | None:
        """Trace the program of so many rows; return None where they must run one by one."""
        program, call = self._program(rows, frozenset(), length)
        # The row itself runs alone.
        self._stager(rows[0], length).is_unread = True
        arguments = program.arguments(call)
        if program.step.jaxpr(*arguments).effects:
            self._programs.remove(program)
            return None
        use: Callable[[Any], None] = program.step.use
        compile_ = program.step.compilation(*arguments)
        if self._executables is None:
            return compile_, use
        known = partial(self._executables.program, program.step.lower(*arguments), self._strategy.mesh)
        return lambda: known() or compile_(), use

    def _program(self, rows: Sequence[Row], extra: frozenset[str], slots: int) -> tuple[GroupEntry, Call]:
        """Return the program for some rows, and its call."""
        first, names = rows[0], self._step.scalars | extra
        program = self._programs(self._step.returning(names), names, first.batch, slots, first.is_whole)
        return program, program.call_of(
            self._whole(first.batch) if first.is_whole else self._staged(rows, slots)
        )

    def stop(self) -> None:
        """End a loop that was ended by this process, and not by the data: the other workers' loops, too."""
        self._source.stop()

    @contextlib.contextmanager
    def shared_errors(self) -> Iterator[None]:
        """Let the other workers' loops end with an error of the block, which runs between steps."""
        try:
            yield
        except Exception as error:
            self._source.stop(error)
            raise

    def sharing(self, action: Callable[[], Result]) -> Callable[[], Result]:
        """Return an action that a single worker may begin; see `StepRunner.sharing`."""
        return self._source.sharing(action) if self._shares else action

    def wait_for_all(self) -> None:
        """Wait until all workers have done what they share."""
        if self._shares:
            self._source.wait_for_all()

    @property
    def _shares(self) -> bool:
        """True if all workers must read variables together."""
        return self._strategy.state_layout.needs_all

    def _slots(self, row: Row, extra: frozenset[str] = frozenset()) -> int:
        """Return how many rows like this one a program has room for."""
        if extra or row.is_whole or not self._strategy._runs_ahead or self._can_loop is False:
            return 1
        return self._room_for(row)

    def _room_for(self, row: Row) -> int:
        """Return how many rows like this one may share a program."""
        return slots_for(jax.tree.map(lambda x: np.broadcast_to(x[0], x.shape), row.batch))

    def _staged(self, rows: Sequence[Row], slots: int) -> list[jax.Array]:
        """Return rows on the devices, with their number."""
        stager = self._stager(rows[0], slots)
        stager.begin()
        for row in rows:
            stager.append(row.batch)
        count, batches = stager.place()
        return [count, *jax.tree.leaves(batches)]

    def _stager(self, row: Row, slots: int) -> BatchStager:
        replicas = self._strategy.num_replicas_in_sync
        like = jax.tree.map(lambda x: np.broadcast_to(x[0], (replicas, *x.shape[1:])), row.batch)
        return self._stagers.get(like, slots)

    def _whole(self, batch: PyTree) -> list[jax.Array]:
        """Return a batch on every device."""
        mesh = self._strategy.mesh
        arrays = mesh.put([x[None] for x in jax.tree.leaves(batch)], mesh.replicated)
        return [mesh.put(np.int32(1), mesh.replicated), *arrays]


def _kind_of(program: GroupEntry) -> Hashable:
    """Return the kind of a step, by the variables that it reads and writes."""
    return tuple((tuple(slot.variable.shape), slot.written) for slot in program.plan.slots)
