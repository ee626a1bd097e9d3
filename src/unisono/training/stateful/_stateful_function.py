"""The train, test and predict functions of stateful steps, on a strategy's replicas.

Each batch runs as a step of a custom loop does: as a program that takes the values of the variables that the
step uses, whatever they belong to, and stores the new ones. So Keras' loop carries no state, and the variables
hold their values between the steps.

Tests: tests/virtual/training/stateful/test_steps.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np

from unisono._context import Context
from unisono._reads import NOT_IN_A_STEP
from unisono._types import ArrayLike, PyTree
from unisono._values import PerReplica
from unisono.data._batches import check_values
from unisono.step._call_signature import Call
from unisono.step._compiler import StepCompiler
from unisono.step._explain import explaining
from unisono.step._functional import Replicated, discarded, discover
from unisono.step._interrupts import INTERRUPTS
from unisono.step._keras_internals import all_layers, mark_synced
from unisono.step._program import Program, Run
from unisono.step._scope import StateScope
from unisono.training.stateful._form import STEPS, as_tensorflow
from unisono.training.stateful._stateful_step import StatefulStep
from unisono.training.trainer._batch_policy import BatchPolicy, Mode, rows_in
from unisono.training.trainer._host_timing import HostTimer
from unisono.training.trainer._protocol import State
from unisono.training.trainer._trainer_step import TrainerTask

if TYPE_CHECKING:
    from unisono.strategies._replicated import ReplicatedStrategy


class StatefulFunction:
    """Keras' `train_function`, `test_function` or `predict_function` of a step in TensorFlow's form.

    Args:
        model: the bound model.
        strategy: its strategy.
        task: which function.
    """

    def __init__(self, model: keras.Model, strategy: ReplicatedStrategy, task: TrainerTask) -> None:
        self._model, self._strategy, self._task = model, strategy, task
        self._step = StatefulStep(model, strategy, task)
        self._compiler = StepCompiler(strategy)
        self._policy = BatchPolicy(model, strategy.num_replicas_in_sync)
        self._split = self._step.split
        self._whole = self._step.whole
        #: Where the host's time goes.
        self.timer = HostTimer()

    @property
    def num_programs(self) -> int:
        """How many programs were compiled."""
        return self._compiler.num_programs

    @property
    def usual_rows(self) -> int | None:
        """How many rows the batches of the running call have, but for a ragged last one."""
        return self._policy.usual_rows

    @usual_rows.setter
    def usual_rows(self, value: int | None) -> None:
        self._policy.usual_rows = value

    def __call__(self, state: State, iterator: Iterator[PyTree]) -> tuple[PyTree, State]:
        """Run the next batch, or `steps_per_execution` of them; Keras' convention.

        Raises:
            StopIteration: at the end of the data.
        """
        if INTERRUPTS.pending:
            INTERRUPTS.deliver()
        self.timer.begin()
        try:
            results = [self._run(batch) for batch in self._taken(iterator)]
        finally:
            self.timer.end()
        if not results:
            self._strategy.process_group.note_step(self._task.name.lower(), [])
            raise StopIteration
        # The variables hold the newest state: what Keras has carried is of no use.
        mark_synced(self._model, True)
        if self._task is TrainerTask.PREDICT and len(results) > 1:
            return jax.tree.map(_concatenated, *results), state
        return results[-1], state

    def _taken(self, iterator: Iterator[PyTree]) -> Iterator[PyTree]:
        for _ in range(self._model.steps_per_execution):
            self.timer.wait()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.timer.add([batch])
            check_values(batch)
            yield as_tensorflow(self._model, self._task, batch)

    def _run(self, batch: PyTree) -> PyTree:
        if self._model.run_eagerly or not self._model.jit_compile:
            return _run_eagerly(self._step, batch)
        rows, replicas = rows_in(batch), self._strategy.num_replicas_in_sync
        is_split = replicas > 1 and self._policy.mode(rows) is Mode.SPLIT
        fn = self._split if is_split else self._whole
        if is_split:
            batch = jax.tree.map(lambda x: _in_rows(x, replicas), batch)
        call = Call.parse((batch,), {})
        with explaining(type(self._model), f"`{STEPS[self._task]}`"):
            return self._compiler.entry(fn, call)(call).value


def _in_rows(array: ArrayLike, replicas: int) -> PerReplica:
    return PerReplica.from_stacked(np.reshape(array, (replicas, -1, *np.shape(array)[1:])))


def _concatenated(*parts: ArrayLike) -> np.ndarray:
    return np.concatenate([np.asarray(part) for part in parts])


def _run_eagerly(step: StatefulStep, batch: PyTree) -> PyTree:
    """Run a step op by op, all rows as one replica, so that a debugger sees values."""
    scopes: list[StateScope] = []

    def discovered(arrays: Sequence[Any]) -> None:
        scopes.append(_run_in(step, StateScope(), jax.tree.unflatten(structure, list(arrays)))[1])

    leaves, structure = jax.tree.flatten(batch)
    discover(discovered, leaves)
    touched = list(scopes[-1].seen.values())
    result, scope = _run_in(step, StateScope([(v, v.value) for v in touched]), batch)
    for key, variable in scope.written.items():
        variable.assign(scope.state_mapping[key])
    return result


def _run_in(step: StatefulStep, scope: StateScope, batch: PyTree) -> tuple[PyTree, StateScope]:
    context = Context(step.strategy)
    program = Program([lambda: step.alone(batch)], [lambda: scope], [lambda _: context], NOT_IN_A_STEP)
    result, frame = Run(program).complete(0)
    return result, frame.scope


# --- variables that the first step creates ---------------------------------------------------------------

#: Models whose steps have created their variables, since `compile`.
_BUILT: weakref.WeakKeyDictionary[keras.Model, set[TrainerTask]] = weakref.WeakKeyDictionary()


def forget_built(model: keras.Model) -> None:
    """Let the next call of each method find out what its step creates: the model is compiled again.

    Args:
        model: the model.
    """
    _BUILT.pop(model, None)


def is_built_by_step(model: keras.Model, task: TrainerTask) -> bool:
    """Return whether `build_by_step` was called for a step since the model was compiled.

    Args:
        model: the model.
        task: which step.
    """
    return task in _BUILT.get(model, ())


def build_by_step(model: keras.Model, strategy: ReplicatedStrategy, task: TrainerTask, batch: PyTree) -> None:
    """Create what a step creates, layers' weights, optimizers' slots and metrics, without computing it.

    Keras builds a model by calling it, and builds `model.optimizer` for all weights. What a step in
    TensorFlow's form calls, and which optimizers it uses for which weights, it alone knows.

    Args:
        model: the model.
        strategy: its strategy.
        task: which step.
        batch: host arrays; as Keras' loop gives it.
    """
    call = Call.parse((as_tensorflow(model, task, batch),), {})
    step = Replicated(strategy, StatefulStep(model, strategy, task).whole, call)
    with explaining(type(model), f"`{STEPS[task]}`"):
        discover(lambda arrays: discarded(step([], arrays)), call.arrays)
    _BUILT.setdefault(model, set()).add(task)
    # Keras sets it where a model is called. One whose layers a step has called may have no `call` at all.
    has_own = type(model).build is not keras.Model.build
    if not model.built and not has_own and all(x.built for x in all_layers(model, include_self=False)):
        model.built = True
