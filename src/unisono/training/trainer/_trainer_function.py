"""The train, test and predict functions that Keras' own loop calls.

A `StepLoop` takes the batches and starts the programs; here is what such a program is, and the state that
Keras' loop carries from one to the next.

Tests: tests/virtual/training/test_counts.py, tests/virtual/training/test_exact.py,
tests/virtual/training/test_interrupts.py, tests/virtual/training/test_failures.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import jax
import keras
import numpy as np

from unisono._system._interrupts import INTERRUPTS
from unisono._types import PyTree
from unisono.step._value_handle import whole_value
from unisono.training.groups._batch_placement import BatchGroup, BatchStager, GroupPlacer
from unisono.training.groups._batch_policy import BatchPolicy
from unisono.training.groups._batch_source import BatchSource
from unisono.training.groups._lookahead import StepLookahead
from unisono.training.groups._step_loop import GroupTrace, StepLoop
from unisono.training.replica._step_reading import StepReader, StepReading
from unisono.training.trainer._fit_state import FitState
from unisono.training.trainer._protocol import State
from unisono.training.trainer._step_programs import StepProgram, StepPrograms
from unisono.training.trainer._trainer_step import TrainerStep, TrainerTask

if TYPE_CHECKING:
    from unisono.step._replicas import Replicas


class ReadyProgram(NamedTuple):
    """A program with its arguments on the devices."""

    program: StepProgram
    state: State
    data: PyTree


class TrainerFunction:
    """Keras' `train_function`, `test_function` or `predict_function` on a strategy's replicas."""

    #: What a step is, how its state is carried, and how rows reach the replicas.
    step_type, state_type, policy_type = TrainerStep, FitState, BatchPolicy

    def __init__(self, model: keras.Model, replicas: Replicas, task: TrainerTask) -> None:
        self._replicas, self._task = replicas, task
        reader = StepReader(self._read)
        self._step = self.step_type(model, replicas, task, reader)
        #: The state between calls.
        self.carried = self.state_type(model, replicas, task)
        # XLA adds up the gradients of convolutions of groups once for each device of a replica.
        joins_groups = replicas.mesh.devices_per_replica == 1
        self.batch_policy = self.policy_type(
            model, replicas.num_replicas_in_sync, reader, replicas.joins_rows, joins_groups
        )
        self.mode_of = self.batch_policy.mode_of
        self.loop = StepLoop(model, replicas, task.name.lower(), self)
        self._programs = StepPrograms(self._step, self.carried, self.loop.is_constant)
        #: Where the host's time goes.
        self.timer = self.loop.timer
        self._place = GroupPlacer(replicas.mesh)
        #: What runs ahead of Keras' loop, during a call of `fit` and the like for which steps may.
        self.lookahead: StepLookahead | None = None
        #: The newest state, and whether it is on the devices as programs want it.
        self._state: State = ()
        self._is_placed = False
        #: True if it is as a program has returned it, and no code has read it since.
        self._is_result = False
        #: How many steps were started in all.
        self.num_steps = 0

    def _read(self, batch: PyTree) -> StepReading:
        """Return how the step treats the rows of a batch."""
        return self._step.read(batch)

    @property
    def num_programs(self) -> int:
        """How many programs were compiled."""
        return len(self._programs)

    def __call__(self, state: State, iterator: Iterator[PyTree]) -> tuple[PyTree, State]:
        """Run as many batches as the model executes at once; Keras' convention."""
        if INTERRUPTS.pending:
            INTERRUPTS.deliver()
        # Of arrays that stay on the devices, a step takes the numbers of its rows.
        if hasattr(type(iterator), "rows") and not self.loop.is_eager:
            iterator = getattr(iterator, "rows", iterator)
        if self.lookahead is None:
            return self.run(BatchSource(), state, iterator)
        return self.lookahead.step(self, state, iterator)

    def run(self, source: BatchSource, state: State, iterator: Iterator[PyTree]) -> tuple[PyTree, State]:
        """Run the groups of one call; put the newest state back where it fails."""
        began = perf_counter()
        self.carried.done.clear()
        self._state, self._is_placed = state, False
        try:
            results = self.loop.run(source, iterator)
            logs = source.hand_out(results, self._task is TrainerTask.PREDICT)
            new = self._state
            return logs, new if self.loop.was_eager else self.carried.keep(new, self.num_steps)
        except BaseException:
            self.carried.give_back(state)
            raise
        finally:
            self._state = ()
            self.timer.calls += perf_counter() - began

    def state_after(self, state: State) -> State:
        """Return the state for Keras after a step that was run ahead: computed with the steps before it."""
        return self.carried.require_unchanged(state)

    def begin_with(self, state: State, is_placed: bool = False) -> None:
        """Let the next program begin with a state.

        Args:
            state: what Keras carries, or what a program has returned.
        """
        self._state, self._is_placed = state, is_placed

    def prepare(self, group: BatchGroup) -> ReadyProgram:
        """Return a group's program, with the newest state and the group's batches."""
        if not self._is_placed:
            self._is_result = self.carried.is_returned(self._state)
            self._state = self.carried.place(self._state, group.first)
            self._is_placed = True
        began = perf_counter()
        data, size = self._place(group), self.loop.group_size
        self.timer.placing += perf_counter() - began
        if group.stager is not None and self._programs.agree:
            data = self._replicas.mesh.put_own(np.int32(size.wish)), data
        return ReadyProgram(self._programs.of_group(group), self._state, data)

    def learn(self, group: BatchGroup, program: StepProgram, state: State, data: PyTree) -> None:
        """Count what a program computes, before it runs for the first time."""
        # A loop of constant length counts as often as it runs, another one once.
        steps = group.slots if self.loop.is_constant else 1
        self.timer.count_work().learn(group, steps, lambda: program.jaxpr(state, data))

    def start(self, group: BatchGroup) -> tuple[PyTree, jax.Array | None]:
        """Start a group's program, which continues with the newest state; see `GroupRunner`."""
        if self.loop.was_eager:
            # All rows as one replica, so that a debugger sees values.
            whole = tuple([whole_value(x) for x in part] for part in self._state)
            logs, self._state = self._step.whole(whole, group.first)
            return logs, None
        program, state, data = self.prepare(group)
        if self.timer.work is not None:
            self.learn(group, program, state, data)
        results, self._state = program(state, data, self.carried.done, self._is_result)
        self._is_result = True
        self.num_steps += group.count
        if self._replicas.mesh.spans_processes:
            results = jax.tree.map(self._replicas.mesh.local, results)
        if group.stager is None or not self._programs.agree:
            return results, None
        logs, agreed = results
        return logs, agreed

    def trace(self, group: BatchGroup, stager: BatchStager) -> GroupTrace:
        """Return the program of a group of several batches; see `GroupRunner`."""
        program, state, data = self.prepare(group)
        jaxpr = program.jaxpr(state, data)
        size = 0
        if self._task is TrainerTask.TEST:
            # Each replica's part of the metrics, gathered.
            size = self._replicas.num_replicas_in_sync * sum(x.nbytes for x in state[-1])
        elif self._task is TrainerTask.PREDICT:
            outputs = jaxpr.out_avals[: -1 - len(jax.tree.leaves(state))]
            size = int(sum(x.size * x.dtype.itemsize for x in outputs) // stager.slots)
        remove = lambda: self._programs.remove(program)  # noqa: E731
        return GroupTrace(jaxpr, size, remove, program.compilation(state, data), program.use)
