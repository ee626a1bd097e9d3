"""Scheduled functions that take batches of the worker which runs them.

The chief does not know the batches: it learns their form from the first worker that has one, and traces the
function for it. A batch of another form, as the last one of an epoch, makes another program.

Tests: tests/virtual/test_coordinator.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from unisono._errors import UnsupportedError
from unisono._types import PyTree, UserValue
from unisono.coordinator._values import PerWorkerIterator
from unisono.ps.scheduling._workers import BatchFunction, RunResult
from unisono.ps.worker._batch_spec import describe, rebuild
from unisono.step._call_signature import Call, Result
from unisono.step._identity import identity_of
from unisono.strategies.parameter_server._job import Job
from unisono.training.pushed._function_step import FunctionProgram, FunctionSteps, WorkerIterator

_NUMBERS = itertools.count()


@dataclasses.dataclass(frozen=True, eq=False)
class GivenCall:
    """One call, with what stands for the iterators of the workers among its arguments.

    Args:
        iterators: their names, each once.
        example: arguments and keyword arguments.
        arrays: those among them.
        key: what calls of one kind have in common.
    """

    iterators: Sequence[str]
    example: tuple[tuple[UserValue, ...], dict[str, UserValue]]
    arrays: list[Any]
    key: Hashable

    @classmethod
    def of(
        cls,
        fn: Callable[..., UserValue],
        given: tuple[tuple[UserValue, ...], dict[str, UserValue]],
        iterators: Sequence[str],
    ) -> GivenCall:
        """Take a call apart.

        Args:
            fn: the function.
            given: its arguments and keyword arguments.
            iterators: the names of the iterators among them, each once.
        """
        example = _without_iterators(given, iterators, [()] * len(iterators))
        call = Call.parse(*example)
        return cls(
            iterators, example, [_canonical(x) for x in call.arrays], (identity_of(fn), call.signature)
        )


class BatchCall:
    """Calls of one function with arguments of one kind, among them iterators of the workers.

    Args:
        fn: the function.
        first: one of the calls.
        steps: makes programs.
        job: runs them.
    """

    def __init__(
        self, fn: Callable[..., UserValue], first: GivenCall, steps: FunctionSteps, job: Job
    ) -> None:
        self._fn, self._steps, self._job = fn, steps, job
        self._example = first.example
        self._function = BatchFunction(f"function {next(_NUMBERS)}", tuple(range(len(first.iterators))))
        self._results: dict[str, Result] = {}
        self._states: tuple[int, ...] | None = None
        job.trace_with(self._function, self._trace)

    def run(self, call: GivenCall) -> Future[RunResult]:
        """Schedule a call; return its result, later.

        Args:
            call: one of this kind.
        """
        return self._job.run_function(self._function, call.iterators, call.arrays)

    def rebuild(self, done: RunResult) -> PyTree:
        """Return the function's result.

        Args:
            done: what a worker has computed.
        """
        return self._results[done.plan].rebuild(done.arrays)

    def _trace(self, form: str) -> None:
        """Make the program for batches of a form, or learn which batches the function takes."""
        batches = rebuild(form, lambda dtype, shape: jax.ShapeDtypeStruct(shape, _canonical_dtype(dtype)))
        specs: dict[int, PyTree] = {}
        for number, batch in zip(self._function.reads, batches, strict=True):
            if describe_spec(specs.setdefault(number, batch)) != describe_spec(batch):
                raise UnsupportedError(
                    "The batches that one call of a function takes from one iterator must have one form. "
                    f"Received: {form}. Take them in several calls, or drop the last, smaller batch."
                )
        count = 1 + max(self._function.reads)
        args, kwargs = _without_iterators(self._example, (), [specs.get(i, ()) for i in range(count)])
        program = self._steps.program(self._fn, args, kwargs)
        self._use(program, form)

    def _use(self, program: FunctionProgram, form: str) -> None:
        step = program.step
        streams = tuple(id(s.variable) for s in step.streams)
        if self._states not in (None, streams):
            raise UnsupportedError(
                "A function must use the same random generators for batches of every form. Received: "
                f"others for {form}."
            )
        self._job.placed.place([(v, None) for v in program.variables], step.optimizers, step.tables)
        fits = program.reads == self._function.reads
        if not program.reads:
            self._function.plan = self._job.use(step)
            self._results[self._function.plan] = step.result
        elif fits:
            self._results[self._job.use(step, (self._function, form))] = step.result
        self._states, self._function.reads = streams, program.reads
        self._function.states = lambda: self._job.streams.take(step.streams)


def _without_iterators(
    given: PyTree, iterators: Sequence[str], specs: Sequence[PyTree]
) -> tuple[tuple[UserValue, ...], dict[str, UserValue]]:
    """Return arguments with what stands for the workers' iterators, by their place in the call."""
    place = {name: number for number, name in enumerate(iterators)}

    def stand_in(leaf: Any) -> Any:
        if isinstance(leaf, PerWorkerIterator):
            return WorkerIterator(place[leaf.name], specs[place[leaf.name]])
        return WorkerIterator(leaf.number, specs[leaf.number]) if isinstance(leaf, WorkerIterator) else leaf

    args, kwargs = jax.tree.map(stand_in, given)
    return args, kwargs


def describe_spec(spec: PyTree) -> str:
    """Return the form of a structure of shapes and types as a text.

    Args:
        spec: pytree of `jax.ShapeDtypeStruct`.
    """
    return describe(jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), spec))[0]


def _canonical_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _canonical(array: Any) -> np.ndarray:
    host = np.asarray(array)
    return np.asarray(host, _canonical_dtype(host.dtype))
