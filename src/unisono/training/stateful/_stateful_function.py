"""The train, test and predict functions of stateful steps, on a strategy's replicas.

Each batch runs as a step of a custom loop does: as a program that takes the values of the variables that the
step uses, whatever they belong to, and stores the new ones. So Keras' loop carries no state, and the
variables hold their values between the steps.

Tests: tests/virtual/training/stateful/test_steps.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from unisono.step._compiler import Entry, StepCompiler
from unisono.step._explain import explaining
from unisono.step._functional import discover
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
        self._is_prepared = False
        #: Where the host's time goes.
        self.timer = HostTimer()

    @property
    def num_programs(self) -> int:
        """How many programs were compiled."""
        return self._compiler.num_programs

    def prepare(self, batch: PyTree) -> None:
        """Create what the step creates, layers' weights, optimizers' slots and metrics, without computing it.

        Keras builds a model by calling it, and builds `model.optimizer` for all weights. What a step in
        TensorFlow's form calls, and which optimizers it uses for which weights, it alone knows.

        Args:
            batch: the first one, as Keras' loop gives it.
        """
        if self._is_prepared:
            return
        batch = as_tensorflow(self._model, self._task, batch)
        metrics = _ids_of_metrics(self._model)
        self._entry(*self._call_of(batch))
        if _ids_of_metrics(self._model) != metrics:
            # Metrics that are there when the step begins are merged in another way.
            self._compiler = StepCompiler(self._strategy)
            self._entry(*self._call_of(batch))
        mark_built(self._model)
        self._is_prepared = True

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
        fn, call = self._call_of(batch)
        return self._entry(fn, call)(call).value

    def _call_of(self, batch: PyTree) -> tuple[Callable[[PyTree], PyTree], Call]:
        """Return what each replica calls with a batch, and the arguments."""
        replicas = self._strategy.num_replicas_in_sync
        if replicas == 1 or self._policy.mode(rows_in(batch)) is not Mode.SPLIT:
            return self._whole, Call.parse((batch,), {})
        return self._split, Call.parse((jax.tree.map(lambda x: _in_rows(x, replicas), batch),), {})

    def _entry(self, fn: Callable[[PyTree], PyTree], call: Call) -> Entry:
        with explaining(type(self._model), f"`{STEPS[self._task]}`"):
            return self._compiler.entry(fn, call)


def mark_built(model: keras.Model) -> None:
    """Note that a model is built, of which a step has built all layers: it may have no `call`.

    Keras notes it where a model is called.

    Args:
        model: the model.
    """
    has_own = type(model).build is not keras.Model.build
    if not model.built and not has_own and all(x.built for x in all_layers(model, include_self=False)):
        model.built = True
    for call in vars(model).pop(_WHEN_BUILT, ()):
        call()


#: The attribute of a model with what is called when a step has built it.
_WHEN_BUILT = "_unisono_when_built"


def when_built_by_step(model: keras.Model, call: Callable[[], None]) -> None:
    """Call a function once, when a step in TensorFlow's form has built a model.

    Args:
        model: not built yet.
        call: the function.
    """
    # Not by Keras' own `__setattr__`, which tracks lists.
    vars(model).setdefault(_WHEN_BUILT, []).append(call)


def _ids_of_metrics(model: keras.Model) -> set[int]:
    return {id(v) for v in model.metrics_variables}


def _in_rows(array: ArrayLike, replicas: int) -> PerReplica:
    return PerReplica.from_stacked(np.reshape(array, (replicas, -1, *np.shape(array)[1:])))


def _concatenated(*parts: ArrayLike) -> np.ndarray:
    return np.concatenate([np.asarray(part) for part in parts])


def _run_eagerly(step: StatefulStep, batch: PyTree) -> PyTree:
    """Run a step op by op, all rows as one replica, so that a debugger sees values."""
    scopes: list[StateScope] = []

    def discovered(arrays: Sequence[Any]) -> None:
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
    context = Context(step.strategy)
    bodies, scopes = [lambda: step.alone(batch)], [lambda: StateScope(pairs)]
    program = Program(bodies, scopes, [lambda _: context], NOT_IN_A_STEP)
    result, frame = Run(program).complete(0)
    return result, frame.scope
