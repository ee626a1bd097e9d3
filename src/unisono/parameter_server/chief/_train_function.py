"""The train, test and predict functions that Keras' loop calls under a `ParameterServerStrategy`.

Each batch of the chief's pipeline goes to a worker, with the model's step as a program. The function returns
at once: logs and predictions are read when their numbers are needed. What Keras carries from step to step
says only that the variables are on servers. Reading one of them, as Keras does at the end of an epoch, waits
for all steps.

Tests: tests/virtual/strategies/test_parameter_server_fit.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np

from unisono._errors import UnsupportedError
from unisono._features import load
from unisono._system._interrupts import INTERRUPTS
from unisono._system._task_reports import process_events
from unisono._types import PyTree
from unisono.data._batches import check_values
from unisono.parameter_server.chief._job import Job
from unisono.parameter_server.chief._worker_datasets import RunningCalls
from unisono.parameter_server.chief._workers import RunResult
from unisono.parameter_server.programs._function_step import FunctionProgram, FunctionSteps
from unisono.parameter_server.programs._worker_step import WorkerStep
from unisono.parameter_server.server._traffic import StepTally
from unisono.step._call_signature import Result
from unisono.step._keras_internals import mark_synced, set_training_state
from unisono.step.variables._merge_rules import kind_of
from unisono.training.groups._multi_step import LazyArray
from unisono.training.stateful._form import as_tensorflow
from unisono.training.stateful._stateful_function import mark_built
from unisono.training.stateful._stateful_step import StatefulStep
from unisono.training.trainer._protocol import State
from unisono.training.trainer._trainer_step import TrainerTask

if TYPE_CHECKING:
    from unisono.strategies._replicated import ReplicatedStrategy

#: How many batches wait on the chief at most, for each worker, besides those that it has been sent.
_WAITING = 2


class RemoteTrainFunction:
    """Keras' `train_function`, `test_function` or `predict_function` on the workers.

    Args:
        strategy: its strategy, of one replica, with a `PushLayout`.
        calls: what the running call of `fit` has.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: ReplicatedStrategy,
        task: TrainerTask,
        job: Job,
        calls: RunningCalls,
    ) -> None:
        self._model, self._task, self._job, self._calls = model, task, job, calls
        self._steps = WorkerStep(model, strategy._replicas, task, job.destination)
        #: What the last call returned, and Keras' loop gives to the next one.
        self._after: State = ()
        #: The `id`s of the variables that are on servers.
        self._ids: tuple[int, ...] = ()
        #: What Keras finds in its variables when its loop ends, without the states of random generators.
        self._held: list[list[Any]] = []
        #: The variables of random generators, each with its list in Keras' state and its place there.
        self._seeds: list[tuple[keras.Variable, int, int]] = []

    @property
    def num_programs(self) -> int:
        """How many programs were made."""
        return self._steps.num_programs

    def __call__(self, state: State, iterator: Iterator[PyTree]) -> tuple[PyTree, State]:
        """Send the next batch, or `steps_per_execution` of them, to workers; Keras' convention.

        Raises:
            StopIteration: at the end of the data.
        """
        if INTERRUPTS.pending:
            INTERRUPTS.deliver()
        if self._model.run_eagerly:
            raise UnsupportedError(
                "Under a `ParameterServerStrategy` steps are compiled programs of the workers. Received: a "
                "model compiled with `run_eagerly=True`. Leave it out of `compile`."
            )
        results: list[PyTree] = []
        before = state
        while len(results) < self._model.steps_per_execution:
            batch = next(iterator, None)
            if batch is None:
                if not results:
                    raise StopIteration
                break
            check_values(batch)
            result, state = self._send(state, batch)
            results.append(result)
        if state is not before:
            # Where Keras looks for the newest state after an interrupt.
            set_training_state(self._model, dict(zip(self._task.value, state, strict=True)))
        return self._joined(results), state

    def _send(self, state: State, batch: PyTree) -> tuple[PyTree, State]:
        job, own = self._job, self._calls.current
        if state is not self._after:
            self._place(state, batch)
        for variable, part, place in self._seeds:
            # Where workers take batches, states advance when the calls are sent, later than here.
            if own is None or not job.streams.knows(variable):
                job.streams.follow(variable, state[part][place])
        job.pool.queue.wait_for_room(_WAITING * job.num_workers + 1)
        # The logs have the same names for batches of all forms.
        program = self._steps.program(batch)
        if own is None:
            future = job.run(program, jax.tree.leaves(batch), self._tally)
        else:
            future = own.run(self._of_batches, self._tally)
        self._count_rows(batch, future)
        if self._seeds or state is not self._after:
            after = tuple(map(list, self._held))
            for variable, part, place in self._seeds:
                after[part][place] = job.streams.held(variable)
            self._after = after
        return self._lazy(program.result, future), self._after

    def _place(self, state: State, batch: PyTree) -> None:
        """Bring the variables to servers with which Keras' loop begins, or goes on after a callback."""
        lists, placed = self._steps.look(), self._job.variables
        variables = [v for part in lists for v in part]
        ids = tuple(map(id, variables))
        if ids != self._ids:
            # The step says which of them are tables, and what it calls besides the model's optimizer.
            step = self._steps.program(batch)
            own = [self._model.optimizer] if self._task is TrainerTask.TRAIN else []
            others = [o for o in step.optimizers if o is not self._model.optimizer]
            values = [value for part in state for value in part]
            placed.place(list(zip(variables, values, strict=True)), [*own, *others], step.tables)
            places = [(v, i, j) for i, part in enumerate(lists) for j, v in enumerate(part)]
            self._seeds = [(v, i, j) for v, i, j in places if kind_of(v).is_seed]
            self._ids = ids
        seeds = {id(v) for v, _, _ in self._seeds}
        self._held = [[None if id(v) in seeds else placed[v] for v in part] for part in lists]

    def _count_rows(self, batch: PyTree, future: Future[RunResult]) -> None:
        """Tell a launcher the rows of a step of `fit`, once a worker has run it."""
        if self._task is not TrainerTask.TRAIN or not (events := process_events()).is_read:
            return
        work = load("work of a batch")(batch)

        def note(done: Future[RunResult]) -> None:
            if not done.cancelled() and done.exception() is None:
                events.worked(work, None, 1)

        future.add_done_callback(note)

    @property
    def _tally(self) -> StepTally | None:
        """What counts the steps of `fit`."""
        return self._calls.tally if self._task is TrainerTask.TRAIN else None

    def _of_batches(self, batch: PyTree) -> FunctionProgram:
        """Return the program for batches of a worker; what it needs is on servers already."""
        return FunctionProgram(self._steps.program(batch), (0,), ())

    def _lazy(self, result: Result, future: Future[RunResult]) -> PyTree:
        """Return the step's result around arrays that are read later."""
        queue = self._job.pool.queue
        # As many as leaves at most: what is no array is in the result already.
        count = len(result.statics)
        return result.rebuild([LazyArray(lambda: queue.result(future).arrays, i) for i in range(count)])

    def _joined(self, results: Sequence[PyTree]) -> PyTree:
        """Return what Keras' loop gets of several steps: the last logs, or all predictions."""
        if self._task is not TrainerTask.PREDICT or len(results) == 1:
            return results[-1]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *results)


class RemoteStatefulTrainFunction(RemoteTrainFunction):
    """The same for a step in TensorFlow's form, whose variables are those that its trace finds."""

    def __init__(
        self,
        model: keras.Model,
        strategy: ReplicatedStrategy,
        task: TrainerTask,
        job: Job,
        calls: RunningCalls,
    ) -> None:
        super().__init__(model, strategy, task, job, calls)
        self._step = StatefulStep(model, strategy._replicas, task).alone
        self._functions = FunctionSteps(strategy, job.destination)

    @property
    def num_programs(self) -> int:
        """How many programs were made."""
        return self._functions.num_programs

    def prepare(self, batch: PyTree) -> None:
        """Create what the step creates, as `StatefulFunction.prepare` does."""
        self._functions.program(self._step, (as_tensorflow(self._model, self._task, batch),))
        mark_built(self._model)

    def _send(self, state: State, batch: PyTree) -> tuple[PyTree, State]:
        job, own = self._job, self._calls.current
        found = self._of_batches(batch)
        job.place(found)
        job.pool.queue.wait_for_room(_WAITING * job.num_workers + 1)
        if own is None:
            given = (as_tensorflow(self._model, self._task, batch),)
            future = job.run(found.step, self._functions.arrays(given), self._tally)
        else:
            future = own.run(self._of_batches, self._tally)
        self._count_rows(batch, future)
        # The variables stand for the values on servers: what Keras carries is of no use.
        mark_synced(self._model, True)
        return self._lazy(found.step.result, future), state

    def _of_batches(self, batch: PyTree) -> FunctionProgram:
        given = (as_tensorflow(self._model, self._task, batch),)
        return dataclasses.replace(self._functions.program(self._step, given), reads=(0,))
