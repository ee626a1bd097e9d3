"""The train, test and predict functions of stateful steps, on a strategy's replicas.

Each batch runs as a step of a custom loop does: as a program that takes the values of the variables that the
step uses, whatever they belong to, and stores the new ones. So Keras' loop carries no state, and the
variables hold their values between the steps.

Tests: tests/virtual/training/stateful/test_steps.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import jax
import keras
import numpy as np

from unisono._reads import NOT_IN_A_STEP
from unisono._system._interrupts import INTERRUPTS
from unisono._types import ArrayLike, PyTree
from unisono._values import PerReplica
from unisono.step._call_signature import Call, CallArray
from unisono.step._compiler import Entry, StepCompiler
from unisono.step._explain import explaining
from unisono.step._functional import ReplicatedStep, discover
from unisono.step._keras_internals import all_layers, mark_synced
from unisono.step._program import Program, Run
from unisono.step._scope import StateScope
from unisono.step.variables._merge_rules import Merge
from unisono.training._step_form import WHEN_BUILT
from unisono.training.groups._batch_placement import BatchGroup, BatchStager
from unisono.training.groups._batch_policy import BatchPolicy, Mode, rows_in
from unisono.training.groups._batch_source import BatchSource
from unisono.training.groups._lookahead import StepLookahead
from unisono.training.groups._step_loop import GroupTrace, StepLoop
from unisono.training.replica._replicated_reading import read_replicated
from unisono.training.replica._step_reading import StepReading
from unisono.training.replica._unread_steps import read_per_replica, unread_step
from unisono.training.stateful._form import as_tensorflow
from unisono.training.stateful._grouped_program import RepeatedEntry
from unisono.training.stateful._stateful_step import StatefulStep
from unisono.training.trainer._protocol import State
from unisono.training.trainer._trainer_step import TrainerTask

if TYPE_CHECKING:
    from unisono.step._replicas import Replicas


class StatefulFunction:
    """Keras' `train_function`, `test_function` or `predict_function` of a step in TensorFlow's form."""

    def __init__(self, model: keras.Model, replicas: Replicas, task: TrainerTask) -> None:
        self._model, self._replicas, self._task = model, replicas, task
        self._step = StatefulStep(model, replicas, task)
        # Its arguments are batches, of whose shapes the policy says more.
        self._compiler = StepCompiler(replicas, warns=False)
        self.batch_policy = BatchPolicy(model, replicas.num_replicas_in_sync, self._reading)
        self._split = self._step.split
        self._whole = self._step.whole
        self._is_prepared = False
        # A program of one step notes its batch itself.
        self._loop = StepLoop(model, replicas, task.name.lower(), self, notes_lone=False)
        #: Where the host's time goes.
        self.timer = self._loop.timer
        #: What runs ahead of Keras' loop, during a call in which no callback sees single batches.
        self.lookahead: StepLookahead | None = None
        self._repeating: dict[tuple[Entry, int], RepeatedEntry] = {}
        self._used: set[Entry] = set()

    @property
    def num_programs(self) -> int:
        """How many programs have run."""
        return len(self._used) + sum(entry.is_used for entry in self._repeating.values())

    def prepare(self, batch: PyTree) -> None:
        """Create what the step creates, layers' weights, optimizers' slots and metrics, without computing it.

        Keras builds a model by calling it, and builds `model.optimizer` for all weights. What a step in
        TensorFlow's form calls, and which optimizers it uses for which weights, it alone knows.
        """
        if self._is_prepared:
            return
        batch = as_tensorflow(self._model, self._task, batch)
        metrics = _ids_of_metrics(self._model)
        self._entry(*self._call_of(batch))
        if _ids_of_metrics(self._model) != metrics:
            # Metrics that are there when the step begins are merged in another way.
            self._compiler = StepCompiler(self._replicas, warns=False)
            self._entry(*self._call_of(batch))
        mark_built(self._model)
        self._is_prepared = True

    def __call__(self, state: State, iterator: Iterator[PyTree]) -> tuple[PyTree, State]:
        """Run the next batch, or `steps_per_execution` of them; Keras' convention."""
        if INTERRUPTS.pending:
            INTERRUPTS.deliver()
        # A guess what callbacks do needs a state that Keras carries.
        if self.lookahead is None or self.lookahead.is_guess:
            return self.run(BatchSource(), state, iterator)
        return self.lookahead.step(self, state, iterator)

    def run(self, source: BatchSource, state: State, iterator: Iterator[PyTree]) -> tuple[PyTree, State]:
        """Run the groups of one call."""
        began = perf_counter()
        try:
            results = self._loop.run(source, iterator)
        finally:
            self.timer.calls += perf_counter() - began
        return source.hand_out(results, self._task is TrainerTask.PREDICT), self.state_after(state)

    def state_after(self, state: State) -> State:
        """Return what Keras carries; the variables hold the newest state."""
        mark_synced(self._model, True)
        return state

    def mode_of(self, batch: PyTree) -> tuple[Mode, int]:
        """Return how the rows of a batch reach the replicas: all on each where they do not divide."""
        sizes = {np.shape(x)[:1] for x in jax.tree.leaves(batch)}
        alone = self._replicas.num_replicas_in_sync == 1
        if (alone and len(sizes) != 1) or self.batch_policy.is_unequal(batch):
            # Such a step may get arrays that have not the same number of rows.
            return Mode.WHOLE, 0
        rows = rows_in(batch)
        mode = self.batch_policy.mode(as_tensorflow(self._model, self._task, batch), rows)
        return mode if mode is Mode.SPLIT else Mode.WHOLE, rows

    def _reading(self, batch: PyTree) -> StepReading:
        """Return how the step treats rows: each replica computes its own where the numbers are the same."""
        reason = f"the model has a `{self._task.step}` of its own"
        trains, count = self._task is TrainerTask.TRAIN, self._replicas.num_replicas_in_sync
        rows = count * max(2, rows_in(batch) // count)
        empty = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), (rows, *x.shape[1:])), batch)
        call = Call.parse((jax.tree.map(lambda x: _in_rows(x, count), empty),), {})
        plan = self._entry(self._split, call).plan
        reading = read_replicated(ReplicatedStep(self._replicas, self._split, call, plan))
        if reading is None:
            return read_per_replica(self._model, trains, batch, count, reason)
        # Copies merge by a guess here: as a mean, or the first replica's.
        merged = (Merge.KEEP, Merge.MEAN)
        states = (f"{v.path}: {meaning}" for v, rule, meaning in reading.guessed if rule not in merged)
        return dataclasses.replace(
            unread_step(self._model, trains, reason),
            mixes=reading.mixes or next(states, ""),
            draws=tuple(s.variable.path for s in plan.slots if s.rule is Merge.SEED and s.written),
        )

    def start(self, group: BatchGroup) -> tuple[PyTree, jax.Array | None]:
        """Start a group's program; see `GroupRunner`."""
        if group.stager is not None:
            return self._repeated(group).run(group.stager, self._loop.group_size.wish)
        batch = as_tensorflow(self._model, self._task, group.first)
        if self._loop.is_eager:
            return _run_eagerly(self._step, batch), None
        fn, call = self._call_of(batch)
        entry = self._entry(fn, call)
        self._used.add(entry)
        return entry(call).value, None

    def trace(self, group: BatchGroup, stager: BatchStager) -> GroupTrace:
        """Return the program of a group of several batches; see `GroupRunner`."""
        program = self._repeated(group)
        call = program.call_with(stager, self._loop.group_size.wish)
        jaxpr = program.step.jaxpr(*program.arguments(call))
        size = 0
        if self._task is TrainerTask.PREDICT:
            outputs = jaxpr.out_avals[: len(jaxpr.out_avals) - program.num_other_outputs]
            size = int(sum(x.size * x.dtype.itemsize for x in outputs) // stager.slots)
        compile_ = program.step.compilation(*program.arguments(call))
        return GroupTrace(jaxpr, size, lambda: None, compile_, program.step.use)

    def _repeated(self, group: BatchGroup) -> RepeatedEntry:
        """Return the program for several batches like the first one."""
        fn, call = self._call_of(as_tensorflow(self._model, self._task, group.first))
        one = self._entry(fn, call)
        key = one, group.slots
        if key not in self._repeating:
            self._repeating[key] = RepeatedEntry(one, fn, call, group.slots, self._loop.is_constant)
        return self._repeating[key]

    def _call_of(self, batch: PyTree) -> tuple[Callable[[PyTree], PyTree], Call]:
        """Return what each replica calls with a batch, and the arguments."""
        self.batch_policy.note_shapes(batch)
        count = self._replicas.num_replicas_in_sync
        is_whole = count == 1 or self.batch_policy.is_unequal(batch)
        if is_whole or self.batch_policy.mode(batch, rows_in(batch)) is not Mode.SPLIT:
            return self._whole, Call.parse((batch,), {})
        return self._split, Call.parse((jax.tree.map(lambda x: _in_rows(x, count), batch),), {})

    def _entry(self, fn: Callable[[PyTree], PyTree], call: Call) -> Entry:
        with explaining(type(self._model), f"`{self._task.step}`"):
            return self._compiler.entry(fn, call)


def mark_built(model: keras.Model) -> None:
    """Note that a model is built, of which a step has built all layers: it may have no `call`.

    Keras notes it where a model is called.
    """
    has_own = type(model).build is not keras.Model.build
    if not model.built and not has_own and all(x.built for x in all_layers(model, include_self=False)):
        model.built = True
    for call in vars(model).pop(WHEN_BUILT, ()):
        call()


def _ids_of_metrics(model: keras.Model) -> set[int]:
    return {id(v) for v in model.metrics_variables}


def _in_rows(array: ArrayLike, replicas: int) -> PerReplica:
    return PerReplica.from_stacked(np.reshape(array, (replicas, -1, *np.shape(array)[1:])))


def _run_eagerly(step: StatefulStep, batch: PyTree) -> PyTree:
    """Run a step op by op, all rows as one replica, so that a debugger sees values."""
    scopes: list[StateScope] = []

    def discovered(arrays: Sequence[CallArray]) -> None:
        scopes.append(_run_with(step, [], jax.tree.unflatten(structure, list(arrays)))[1])

    leaves, structure = jax.tree.flatten(batch)
    discover(discovered, leaves)
    touched = list(scopes[-1].seen.values())
    result, scope = _run_with(step, [(v, v.value) for v in touched], batch)
    for key, variable in scope.written.items():
        variable.assign(scope.state_mapping[key])
    return result


def _run_with(
    step: StatefulStep, pairs: list[tuple[keras.Variable, jax.Array]], batch: PyTree
) -> tuple[PyTree, StateScope]:
    """Run a step with values of variables; return its result, and the state after it."""
    context = step.replicas.context()
    bodies, scopes = [lambda: step.alone(batch)], [lambda: StateScope(pairs)]
    program = Program(bodies, scopes, [lambda _: context], NOT_IN_A_STEP)
    result, frame = Run(program).complete(0)
    return result, frame.scope
