"""Functions over batches of the worker that runs them: of a coordinator, of `fit`, of an Estimator.

The chief does not know the batches: it learns their form from the first worker that has one, and makes the
program for it. A batch of another form, as the last one of an epoch, makes another program.

Tests: tests/virtual/test_coordinator.py, tests/virtual/strategies/test_parameter_server_data.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import jax

from unisono._errors import UnsupportedError
from unisono._types import PyTree
from unisono.parameter_server.chief._streams import RandomStream
from unisono.parameter_server.chief._workers import BatchFunction, RunRequest, RunResult
from unisono.parameter_server.programs._function_step import FunctionProgram
from unisono.parameter_server.server._traffic import StepTally
from unisono.parameter_server.worker._batch_spec import rebuild
from unisono.step._call_signature import Result

if TYPE_CHECKING:
    import numpy as np

    from unisono.parameter_server.chief._job import Job

_NUMBERS = itertools.count()


class ScheduledFunction:
    """A function whose calls take batches of the worker that runs them.

    Args:
        make: gets shapes and types of a batch of each iterator, `()` for one that is not read; returns the
            program.
    """

    def __init__(
        self, job: Job, kind: str, make: Callable[[list[PyTree]], FunctionProgram], count: int = 1
    ) -> None:
        self._job, self._make, self._count = job, make, count
        self._function = BatchFunction(f"{kind} {next(_NUMBERS)}", tuple(range(count)), self._trace)
        #: By the name of a plan.
        self._results: dict[str, Result] = {}
        #: The random generators of all programs; None before the first.
        self.streams: tuple[RandomStream, ...] | None = None
        #: The programs for batches of each form.
        self.programs: list[FunctionProgram] = []

    def run(
        self, iterators: Sequence[str], arrays: Sequence[np.ndarray] = (), tally: StepTally | None = None
    ) -> Future[RunResult]:
        """Schedule a call; return its result, later."""
        request = RunRequest(None, list(arrays), self._function, tuple(iterators), tally=tally)
        return self._job.pool.queue.schedule(request)

    def rebuild(self, done: RunResult) -> PyTree:
        """Return the function's result."""
        return self._results[done.plan].rebuild(done.arrays)

    def _trace(self, form: str) -> None:
        """Make the program for batches of a form, or learn which batches the function takes."""
        function = self._function
        specs: dict[int, PyTree] = {}
        for number, batch in zip(function.reads, rebuild(form, _spec), strict=True):
            if specs.setdefault(number, batch) != batch:
                raise UnsupportedError(
                    "The batches that one call of a function takes from one iterator must have one form. "
                    f"Received: {form}. Take them in several calls, or drop the last, smaller batch."
                )
        found = self._make([specs.get(number, ()) for number in range(self._count)])
        step = found.step
        if self.streams is None:
            self.streams = step.streams
            function.states = lambda: self._job.streams.take(step.streams)
        if [_advance(s) for s in self.streams] != [_advance(s) for s in step.streams]:
            raise UnsupportedError(
                "A function over workers' batches must use the same random generators for batches of every "
                f"form. Received: others for {form}. Let every batch take the same random numbers, or give "
                "all batches one size."
            )
        self.programs.append(found)
        self._job.place(found)
        if not found.reads:
            function.plan = self._job.use(step)
            self._results[function.plan] = step.result
        elif found.reads == function.reads:
            self._results[self._job.use(step, (function, form))] = step.result
        function.reads = found.reads


def _spec(dtype: np.dtype, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _advance(stream: RandomStream) -> tuple[int, bytes]:
    return id(stream.variable), stream.increment.tobytes()
