"""Named steps of a training on the workers of a cluster with parameter servers.

Each step runs once, on whichever worker is free, with the next element of that worker's own data. Workers
push gradients, and the servers count the step. The chief schedules as many steps as hooks allow, and waits
for them: between two groups nothing runs.

Tests: tests/virtual/estimator/test_parameter_servers.py.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np

from unisono._context import Context, OneReplica, ReplicaContext, current, entered
from unisono._errors import InvalidTypeError
from unisono._system._pickling import pickle_by_value
from unisono._types import PyTree
from unisono.data._batches import as_array, check_values
from unisono.data._sharding import InputContext
from unisono.parameter_server.chief._scheduled_function import ScheduledFunction
from unisono.parameter_server.chief._streams import RandomStream
from unisono.parameter_server.chief._workers import RunResult
from unisono.parameter_server.programs._function_step import (
    FunctionProgram,
    FunctionSteps,
    traced_worker_index,
)
from unisono.parameter_server.programs._push_layout import push_layout_of
from unisono.parameter_server.worker._step_worker import as_worker
from unisono.step._program import current_frame
from unisono.training.named_steps._programs import Programs
from unisono.training.named_steps._protocol import ElementSource, NamedStep, Result

if TYPE_CHECKING:
    from unisono.parameter_server.strategy._parameter_server import ParameterServerStrategy

#: In place of an element: the worker has no further one.
END: Final = ()

_LOG = logging.getLogger("unisono")

_NUMBERS = itertools.count()

#: How many steps wait or run at most, for each worker: as many as hide the way to the chief and back.
_SCHEDULED = 8

#: The same once a worker has no more data: what it is sent is answered at once, without a step.
_SCHEDULED_AT_END = 2

#: Seconds for which data may be missing of workers that are away, while all others have none left.
_AWAY_FOR = 30.0

#: Seconds between two questions meanwhile.
_PAUSE = 0.1


@dataclasses.dataclass(frozen=True, eq=False)
class NoData:
    """What a worker without data answers.

    Args:
        states: of random generators, which no step has used.
    """

    worker: int
    states: list[Any]


@dataclasses.dataclass(frozen=True)
class WorkerElements:
    """The elements of one worker as host arrays, then `END` for ever."""

    source: ElementSource
    context: InputContext

    def __iter__(self) -> Iterator[PyTree]:
        """Begin from the first element."""
        for element in self.source(self.context, None):
            arrays = jax.tree.map(lambda leaf: np.asarray(as_array(leaf)), element)
            check_values(arrays, "(features, labels)")
            yield arrays
        yield from itertools.repeat(END)


def _pickled(source: ElementSource) -> bytes:
    """Return what makes the elements of a worker as bytes, which take the worker's context."""
    try:
        return pickle_by_value(functools.partial(WorkerElements, source))
    except Exception as error:
        raise InvalidTypeError(
            "On a cluster with parameter servers the input_fn runs on the workers, and must be pickled for "
            f"that. Received: {source!r}, which cannot be ({type(error).__name__}: {error}). Open files and "
            "make datasets inside of the input_fn."
        ) from error


class RemoteStepRunner:
    """Runs the named steps of a training on workers.

    Args:
        source: makes each worker's elements.
    """

    def __init__(self, strategy: ParameterServerStrategy, step: NamedStep, source: ElementSource) -> None:
        self._strategy, self._job, self._step, self._source = strategy, strategy._job, step, source
        self._steps = FunctionSteps(strategy, self._job.destination)
        self._layout = push_layout_of(strategy)
        number = next(_NUMBERS)
        self._dataset, self._iterator = f"dataset of Estimator {number}", f"iterator of Estimator {number}"
        self._pickled = _pickled(source)
        #: Shapes and types of the first element.
        self._like: PyTree = None
        #: By the names of what a step returns.
        self._functions: dict[frozenset[str], ScheduledFunction] = {}
        #: The workers that had no more data when they were asked last.
        self._ended: set[int] = set()
        self._has_begun = self._is_over = False

    @property
    def num_programs(self) -> int:
        """How many programs were made."""
        return self._steps.num_programs

    @contextlib.contextmanager
    def around_training(self) -> Iterator[None]:
        """Surround all steps: where they are left by an error, nothing waits for them; data are dropped."""
        try:
            with self._job.around_call():
                yield
        finally:
            if self._has_begun:
                self._job.pool.forget(self._iterator)
                self._job.pool.forget(self._dataset)
        # Not after an error, which may be that a server is away.
        self._free()

    def _free(self) -> None:
        """Let the servers hold nothing more of this training, whose variables the next one makes anew."""
        functions = list(self._functions.values())
        programs = [found.step for function in functions for found in function.programs]
        variables = [v for function in functions for found in function.programs for v in found.variables]
        self._job.release(programs, variables)
        self._layout.forget(variables)

    def create_variables(self) -> bool:
        """Trace the step with an element, so that its variables are made; False without data."""
        for worker in range(self._job.num_workers):
            with as_worker(worker):
                elements = iter(WorkerElements(self._source, InputContext(self._job.num_workers, worker, 1)))
                element = next(elements)
            if element is not END:
                self._like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), element)
                like = jax.tree.map(lambda leaf: leaf[None], element)
                Programs(self._strategy._replicas).create_variables(self._step.create, like, is_whole=False)
                return True
        return False

    def run(
        self, most: int, names: Iterable[str], losses: list[tuple[int, Any]] | None = None
    ) -> tuple[int, Mapping[str, Any]]:
        """Run some steps, and wait for them; see `StepRunner.run`. A program has one step."""
        self._begin()
        losses = [] if losses is None else losses
        extra = frozenset(names) - self._step.scalars
        # Arrays are sent by a program of their own, of the last step alone.
        done, values = self._run_group(most - bool(extra), self._step.scalars, losses)
        if extra and not self._is_over:
            alone, found = self._run_group(1, self._step.scalars | extra, losses)
            done, values = done + alone, found or values
        return done, values

    @contextlib.contextmanager
    def shared_errors(self) -> Iterator[None]:
        """Surround what runs between steps, on the chief alone."""
        yield

    def stop(self) -> None:
        """Do nothing: between two groups no step runs."""

    def sharing(self, action: Callable[[], Result]) -> Callable[[], Result]:
        """Return the action: the chief alone reads what the servers hold."""
        return action

    def wait_for_all(self) -> None:
        """Do nothing: no other process shares anything."""

    def _begin(self) -> None:
        """Let the workers make their data, once."""
        if not self._has_begun:
            self._has_begun = True
            self._job.pool.make_dataset(self._dataset, self._pickled)
            self._job.pool.iterate(self._iterator, self._dataset)

    def _run_group(
        self, most: int, names: frozenset[str], losses: list[tuple[int, Any]]
    ) -> tuple[int, Mapping[str, Any]]:
        if names not in self._functions:
            self._functions[names] = self._scheduled(names)
        function = self._functions[names]
        running: collections.deque[Future[RunResult]] = collections.deque()
        values: Mapping[str, Any] = {}
        first_end: NoData | None = None
        done, last_step = 0, time.monotonic()
        # After an answer without a step none is scheduled in its place until there is one with a step: a
        # worker without data would be asked again and again.
        may_add = True
        while done < most and not self._is_over:
            if may_add or not running:
                room = _SCHEDULED_AT_END if self._ended else _SCHEDULED
                while len(running) < min(room * self._job.num_workers, most - done):
                    running.append(function.run([self._iterator]))
            result = self._result(function, running.popleft())
            if isinstance(result, NoData):
                self._ended.add(result.worker)
                first_end, may_add = first_end or result, False
                if not running:
                    self._look_for_data(last_step)
            else:
                done, values, last_step = done + 1, result, time.monotonic()
                first_end, may_add = None, True
                losses.append((1, [result["loss"]]))
        if self._is_over and first_end is not None:
            # Random generators go on with the states that a worker without data was sent.
            for stream, state in zip(function.streams or (), first_end.states, strict=True):
                stream.variable.assign(state)
        return done, values

    def _look_for_data(self, last_step: float) -> None:
        """Find out whether any worker may have data; wait a moment for one that is away."""
        count = self._job.num_workers
        if len(self._ended) == count:
            self._is_over = True
        elif (away := self._job.pool.away) and time.monotonic() - last_step > _AWAY_FOR:
            self._is_over = True
            _LOG.warning(
                "Training ends without the remaining data of %s, which has been away for %g s.",
                ", ".join(away), _AWAY_FOR,
            )  # fmt: skip
        elif away:
            time.sleep(_PAUSE)

    def _scheduled(self, names: frozenset[str]) -> ScheduledFunction:
        """Return the step, which returns named values, as a function of an element of a worker."""
        step = self._step.returning(names)

        def one(element: PyTree) -> dict[str, jax.Array]:
            with self._as_replica():
                values: dict[str, jax.Array] = step(element).value
                return values

        def make(specs: list[PyTree]) -> FunctionProgram:
            (element,) = specs
            if element == END:
                # Of the first element: the first worker to answer may have none.
                streams = self._steps.program(one, (self._like,)).step.streams
                found = self._steps.program(lambda: self._ended_with(streams))
            else:
                found = self._steps.program(one, (element,))
            return dataclasses.replace(found, reads=(0,))

        return ScheduledFunction(self._job, "step of Estimator", make)

    def _ended_with(self, streams: Sequence[RandomStream]) -> tuple[int | jax.Array | None, list[jax.Array]]:
        """Return the number of a worker without data, and the states that it was sent; traced."""
        states = [stream.variable.value for stream in streams]
        with self._as_replica():
            for stream, state in zip(streams, states, strict=True):
                stream.variable.assign(state + stream.increment)
        return traced_worker_index(), states

    @contextlib.contextmanager
    def _as_replica(self) -> Iterator[None]:
        """Let the code of a block run as one replica of one."""
        context, frame = current() or Context(self._strategy), current_frame()
        if frame is None:
            raise RuntimeError("A step of a worker runs within a program.")
        own = ReplicaContext(self._strategy, OneReplica())
        with entered(dataclasses.replace(context, replica=own)), frame.scope.synced():
            yield

    def _result(self, function: ScheduledFunction, future: Future[RunResult]) -> Mapping[str, Any] | NoData:
        """Wait for a step; return its values by name, or that its worker has no data."""
        try:
            done = self._job.pool.queue.result(future)
        except Exception:
            # Raises the first error of a step, once, when none runs any more.
            self._job.pool.queue.join()
            raise
        found = function.rebuild(done)
        return found if isinstance(found, dict) else NoData(int(np.asarray(found[0])), list(found[1]))
