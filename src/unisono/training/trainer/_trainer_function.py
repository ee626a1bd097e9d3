"""The train, test and predict functions that Keras' own loop calls."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import jax
import numpy as np

from unisono._mesh import AXIS
from unisono.data._batches import check_values
from unisono.step._dispatch import CompiledStep
from unisono.step._engines import SHARDED, UNSHARDED
from unisono.step._interrupts import INTERRUPTS
from unisono.training.trainer._batch_placement import BatchPlacer, BatchStager
from unisono.training.trainer._batch_policy import BatchPolicy, Mode, pad_rows, rows_in
from unisono.training.trainer._fit_state import FitState
from unisono.training.trainer._host_timing import HostTimer
from unisono.training.trainer._lookahead import StepLookahead
from unisono.training.trainer._loop_cost import is_slow_in_loop
from unisono.training.trainer._multi_step import (
    AdaptiveGroupSize,
    multi_step_program,
    slots_for,
    with_agreed_size,
)
from unisono.training.trainer._protocol import State
from unisono.training.trainer._trainer_step import TrainerStep, TrainerTask


class TrainerFunction:
    """Keras' `train_function`, `test_function` or `predict_function` on a strategy's replicas.

    Args:
        model: the bound model.
        strategy: its strategy.
        task: which function.
    """

    def __init__(self, model: Any, strategy: Any, task: TrainerTask) -> None:
        self._step = TrainerStep(model, strategy, task)
        self._model, self._strategy, self._task = model, strategy, task
        self._state = FitState(model, strategy, task)
        self._policy = BatchPolicy(model, strategy.num_replicas_in_sync)
        self._programs: dict[Any, CompiledStep] = {}
        self._steps = 0
        self._groups: dict[Any, BatchStager] = {}
        #: Whether several steps may run in one program; None until the first program is traced.
        self._may_loop: bool | None = None
        self._pace = AdaptiveGroupSize(strategy.mesh.is_spread)
        #: What runs ahead of Keras' loop, during a call of `fit` in which nobody can tell.
        self.lookahead: StepLookahead | None = None
        #: Where the host's time goes.
        self.timer = HostTimer()
        mesh = strategy.mesh
        split = self.timer.timing(BatchPlacer(mesh, mesh.sharded))
        self._place = {
            Mode.SPLIT: split,
            Mode.PADDED: split,
            Mode.WHOLE: self.timer.timing(BatchPlacer(mesh, mesh.replicated)),
        }
        self._place_group = self.timer.timing(BatchStager.placed)

    @property
    def num_programs(self) -> int:
        """How many programs were compiled."""
        return len(self._programs)

    def __call__(self, state: State, iterator: Iterator[Any]) -> tuple[Any, State]:
        """Run as many batches as the model executes at once; Keras' convention."""
        if INTERRUPTS.pending:
            INTERRUPTS.deliver()
        logs = self.lookahead.asked() if self.lookahead is not None else None
        if logs is not None:
            # What this step computes was computed with the steps before it.
            return logs, self._state.require_unchanged(state)
        self.timer.begin()
        self._state.done.clear()
        try:
            if self.lookahead is not None:
                return self._run_ahead(self.lookahead, state, iterator)
            batches = self._take(iterator)
            if self._model.run_eagerly or not self._model.jit_compile:
                return self._eagerly(state, batches)
            return self._compiled(state, batches)
        except BaseException:
            self._state.give_back(state)
            raise
        finally:
            self.timer.ended()

    def _take(self, iterator: Iterator[Any]) -> list[Any]:
        wanted = max(1, self._model.steps_per_execution)
        batches = list(itertools.islice(iterator, wanted))
        self._strategy.note_step(self._task.name.lower(), batches)
        if not batches:
            raise StopIteration
        check_values(batches[0] if len(batches) == 1 else batches)
        self.timer.took(batches)
        return batches

    def _run_ahead(self, ahead: StepLookahead, state: State, iterator: Iterator[Any]) -> tuple[Any, State]:
        """Run the next step, and those after it that fit into its program."""
        strategy, kind = self._strategy, self._task.name.lower()
        try:
            batch = ahead.first(iterator)
        except StopIteration:
            strategy.note_step(kind, [])
            raise
        strategy.note_step(kind, [batch])
        check_values(batch)
        self.timer.took([batch])
        group, state = self._group(batch, slots_for(batch)), self._state.place(state, batch)
        if group is None or not self._loops(state, group):
            return self._one_by_one(state, [batch])
        self.timer.begin()
        began = perf_counter()
        most = min(self._pace.size, group.slots) - 1
        for further in ahead.more(iterator, most, group.fits, waits=strategy.mesh.is_spread):
            strategy.note_step(kind, [further])
            check_values(further)
            self.timer.took([group.added(further)])
            self.timer.begin()
        logs, state = self._together(state, group, perf_counter() - began)
        return ahead.done(logs, group.count), self._state.keep(state, self._steps)

    def _eagerly(self, state: State, batches: list[Any]) -> tuple[Any, State]:
        """Op by op, all rows as one replica, so that a debugger sees values."""
        outputs = []
        for batch in batches:
            logs, state = self._step.whole(state, batch)
            outputs.append(logs)
        return self._joined(outputs), state

    def _compiled(self, state: State, batches: list[Any]) -> tuple[Any, State]:
        state = self._state.place(state, batches[0])
        wanted = self._model.steps_per_execution
        group = None
        if wanted > 1:
            batches = [jax.tree.map(np.asarray, batch) for batch in batches]
            group = self._group(batches[0], wanted)
        if group is not None and all(map(group.fits, batches[1:])) and self._loops(state, group):
            for batch in batches[1:]:
                group.added(batch)
            logs, state = self._together(state, group)
            return self._of_group(logs, group.count), self._state.keep(state, self._steps)
        return self._one_by_one(state, batches)

    def _one_by_one(self, state: State, batches: list[Any]) -> tuple[Any, State]:
        collected = []
        for batch in batches:
            logs, state = self._one(state, batch)
            collected.append(logs)
        outputs = self._joined(collected)
        return jax.tree.map(self._strategy.mesh.local, outputs), self._state.keep(state, self._steps)

    def _one(self, state: State, batch: Any) -> tuple[Any, State]:
        rows = rows_in(batch)
        mode = self._policy.mode(rows)
        if mode is Mode.PADDED:
            replicas = self._strategy.num_replicas_in_sync
            batch = jax.tree.map(lambda x: pad_rows(x, replicas), batch)
        program = self._program(mode, rows if mode is Mode.PADDED else None)
        self._steps += 1
        return program(state, self._place[mode](batch), self._state.done)

    def _group(self, batch: Any, slots: int) -> BatchStager | None:
        """Where several batches like this one are collected, with this one; None if it must run alone."""
        if slots < 2 or self._may_loop is False or self._policy.mode(rows := rows_in(batch)) is Mode.WHOLE:
            return None
        leaves, structure = jax.tree.flatten(batch)
        key = (slots, rows, structure, tuple((x.shape, x.dtype) for x in leaves))
        if key not in self._groups:
            self._groups[key] = BatchStager(self._strategy.mesh, batch, slots)
        group = self._groups[key]
        group.begin()
        group.added(batch)
        return group

    def _loops(self, state: State, group: BatchStager) -> bool:
        """Whether steps may run in one program, by the first such program's trace."""
        if self._may_loop is None:
            program, arguments = self._program_of(group)
            self._may_loop = not is_slow_in_loop(
                program.jaxpr(state, arguments), self._strategy.mesh.platform
            )
            if not self._may_loop:
                del self._programs[next(key for key, value in self._programs.items() if value is program)]
        return self._may_loop

    def _program_of(self, group: BatchStager) -> tuple[CompiledStep, Any]:
        """The program for several steps, and what it takes beside the state."""
        mode, mesh = self._policy.mode(group.rows), self._strategy.mesh
        program = self._program(Mode.TOGETHER, (group.slots, mode, group.rows if mode is Mode.PADDED else 0))
        data = self._place_group(group)
        return program, (mesh.put_own(np.int32(self._pace.wish)), data) if mesh.is_spread else data

    def _together(self, state: State, group: BatchStager, collecting: float = 0.0) -> tuple[Any, State]:
        program, arguments = self._program_of(group)
        logs, state = program(state, arguments, self._state.done)
        self._steps += group.count
        agreed, mesh = None, self._strategy.mesh
        if mesh.is_spread:
            logs, agreed = jax.tree.map(mesh.local, logs)
        self._pace.started(jax.tree.leaves(logs), group.count, collecting, agreed)
        return logs, state

    def _of_group(self, logs: Any, count: int) -> Any:
        """The logs of the last of several steps, as in Keras; the predictions of all of them."""
        if self._task is not TrainerTask.PREDICT:
            return jax.tree.map(lambda x: x[count - 1], logs)
        return jax.tree.map(lambda x: np.asarray(x)[:count].reshape(-1, *x.shape[2:]), logs)

    def _program(self, mode: Mode, detail: Any) -> CompiledStep:
        # After a layer was frozen its weights lie in another part of the state.
        key = mode, detail, tuple(map(len, self._state.layouts))
        if key not in self._programs:
            self._programs[key] = self._compile(mode, detail)
        return self._programs[key]

    def _compile(self, mode: Mode, detail: Any) -> CompiledStep:
        step, batch, outputs = self._step_of(*detail[1:] if mode is Mode.TOGETHER else (mode, detail))
        if mode is Mode.TOGETHER:
            step = multi_step_program(step, slots=detail[0])
            batch, outputs = (UNSHARDED, _later(batch)), _later(outputs)
            if self._strategy.mesh.is_spread:
                step, batch, outputs = with_agreed_size(step, AXIS), (SHARDED, batch), (outputs, UNSHARDED)
        layouts = self._state.layouts
        specs = tuple([layout.spec for layout in part] for part in layouts)
        return CompiledStep(
            step,
            self._strategy.mesh,
            state_shardings=tuple([layout.sharding for layout in part] for part in layouts),
            in_specs=(specs, batch),
            out_specs=(outputs, specs),
        )

    def _step_of(self, mode: Mode, rows: Any) -> tuple[Callable[..., Any], Any, Any]:
        """The step of one batch, and how the batch and what it returns lie on the replicas."""
        if mode is Mode.WHOLE:
            return self._step.whole, UNSHARDED, UNSHARDED
        if mode is Mode.PADDED:
            return functools.partial(self._step.padded, rows), SHARDED, UNSHARDED
        predicts = self._task is TrainerTask.PREDICT and not self._strategy.mesh.is_spread
        return self._step.split, SHARDED, SHARDED if predicts else UNSHARDED

    def _joined(self, outputs: list[Any]) -> Any:
        if self._task is not TrainerTask.PREDICT:
            return outputs[-1]
        if len(outputs) == 1:
            return outputs[0]
        return jax.tree.map(lambda *xs: np.concatenate([np.asarray(x) for x in xs]), *outputs)


def _later(spec: Any) -> Any:
    """How several arrays lie, of which each lies like `spec`."""
    return jax.sharding.PartitionSpec(None, *spec)
