"""`ClusterCoordinator`: functions that run on whichever worker is free, and their results, which come later.

Tests: tests/virtual/test_coordinator.py.
"""

from __future__ import annotations

import collections
import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from unisono._errors import ContextError, InvalidArgumentError, InvalidTypeError
from unisono._reads import DataIterator
from unisono._types import PyTree
from unisono.parameter_server.chief._job import Job
from unisono.parameter_server.chief._scheduled_function import ScheduledFunction
from unisono.parameter_server.chief._worker_datasets import dataset_maker, pickled
from unisono.parameter_server.chief._workers import RunResult
from unisono.parameter_server.programs._function_step import (
    FunctionProgram,
    FunctionSteps,
    WorkerIterator,
    not_a_workers,
    traced_worker_index,
)
from unisono.parameter_server.worker._step_worker import current_worker_index
from unisono.step._call_signature import Call
from unisono.step._identity import identity_of
from unisono.step.functions._function import BoundFunction, Function
from unisono.training._scope_warnings import strategy_used

if TYPE_CHECKING:
    from unisono.parameter_server.chief._workers import WorkerPool
    from unisono.parameter_server.strategy._parameter_server import ParameterServerStrategy

_NUMBERS = itertools.count()

#: Positional and keyword arguments of a call.
Given = TypeVar("Given", bound=tuple[tuple[object, ...], dict[str, object]])


class RemoteValue:
    """The result of a scheduled function.

    `ClusterCoordinator.schedule` returns it.

    Args:
        wait: waits for the function.
        future: the arrays of its result.
        rebuild: puts the result together.
    """

    def __init__(
        self,
        wait: Callable[[Future[RunResult]], RunResult],
        future: Future[RunResult],
        rebuild: Callable[[RunResult], PyTree],
    ) -> None:
        self._wait, self._future, self._rebuild = wait, future, rebuild

    def fetch(self) -> PyTree:
        """Wait for the result, and return it with NumPy arrays.

        Raises:
            CancelledError: the function was dropped because of another one's error.
            Exception: the function's own error.
        """
        return jax.tree.map(_as_numpy, self._rebuild(self._wait(self._future)))

    def get(self) -> PyTree:
        """Wait for the result, and return it with arrays of JAX; see `fetch`."""
        return jax.tree.map(
            lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf,
            self._rebuild(self._wait(self._future)),
        )

    def __repr__(self) -> str:
        return f"<RemoteValue: {'there' if self._future.done() else 'not there yet'}>"


def _as_numpy(leaf: object) -> object:
    # A scalar is a number of NumPy, as in TensorFlow.
    return leaf[()] if isinstance(leaf, np.ndarray) else leaf


class PerWorkerValues:
    """A dataset that every worker makes for itself; `iter` gives a `PerWorkerIterator`.

    `ClusterCoordinator.create_per_worker_dataset` returns it.

    Args:
        pool: the workers.
        name: the workers' name of it.
    """

    def __init__(self, pool: WorkerPool, name: str) -> None:
        self._pool, self._name = pool, name

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self._pool, self._name)


class PerWorkerIterator:
    """An iterator of every worker over its own dataset: an argument for scheduled functions."""

    def __init__(self, pool: WorkerPool, dataset: str) -> None:
        self.name = f"iterator {next(_NUMBERS)}"
        pool.iterate(self.name, dataset)
        # Workers read ahead for it.
        weakref.finalize(self, pool.forget, self.name)

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise ContextError(
            "The iterator of a per-worker dataset can be read on workers alone. Received: `next` on the "
            "coordinator. Pass it to the function that you give to `coordinator.schedule`."
        )


def get_current_worker_index() -> int | jax.Array:
    """Return the number of the worker that runs this code.

    In a function that is given to `ClusterCoordinator.create_per_worker_dataset` it is an int. In a scheduled
    function, whose program is the same on all workers, it is a scalar array of that program.

    Raises:
        ContextError: outside of a worker's functions.
    """
    traced = traced_worker_index()
    return current_worker_index() if traced is None else traced


class ClusterCoordinator:
    """Schedules functions on the workers of a strategy; one object for each strategy.

    A scheduled function runs once, on any worker. If that worker is lost, another one runs it again, and
    what it changes is applied once. The first error of a function is raised by the next call of `schedule`,
    `join` or `done`, when no function runs any more; functions that were scheduled are cancelled.

    Args:
        strategy: a `ParameterServerStrategy` with a cluster.

    Raises:
        InvalidArgumentError: for another strategy.
        UnsupportedError: for one without a cluster.
    """

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        """Return the coordinator of a strategy: the second time, the same one."""
        job = getattr(strategy, "_job", None)
        if not isinstance(job, Job):
            raise InvalidArgumentError(
                "A `ClusterCoordinator` needs a `ParameterServerStrategy`. "
                f"Received: {strategy!r}. Create one, and pass it here."
            )
        made = job.owned.setdefault(cls, super().__new__(cls))
        if not isinstance(made, cls):
            raise TypeError(f"{made!r} is no {cls.__name__}")
        return made

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        if hasattr(self, "_strategy"):
            return
        self._strategy, self._job = strategy, strategy._job
        strategy_used(strategy)
        self._steps = FunctionSteps(strategy, self._job.destination)
        #: By function and kinds of arguments.
        self._functions: dict[Hashable, ScheduledFunction] = {}
        #: What calls will return, with their iterators, which the program may have dropped.
        self._waiting: collections.deque[tuple[Future[RunResult], list[PerWorkerIterator]]] = (
            collections.deque()
        )

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy."""
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., object],
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> RemoteValue:
        """Schedule a function; return its result, later.

        Waits where 262,144 functions wait already.

        Args:
            fn: decorated with `@unisono.function`.
            args: its arguments: arrays, Python objects, iterators of per-worker datasets.
            kwargs: likewise.

        Raises:
            InvalidTypeError: `fn` is no `unisono.function`.
            InvalidArgumentError: an argument is a `RemoteValue`, or an iterator that this process has made.
            Exception: the error of an earlier function, once.
        """
        self._drop_iterators()
        own = _python_function(fn)
        given = (tuple(args or ()), dict(kwargs or {}))
        leaves = jax.tree.leaves(given)
        if any(isinstance(leaf, RemoteValue) for leaf in leaves):
            raise InvalidArgumentError(
                "An argument of a scheduled function must be there already. Received: a `RemoteValue`. "
                "Fetch it first, or compute it inside of the function."
            )
        if any(isinstance(leaf, DataIterator) for leaf in leaves):
            raise not_a_workers("as argument")
        iterators = {leaf.name: leaf for leaf in leaves if isinstance(leaf, PerWorkerIterator)}
        if iterators:
            taking, rebuild = self._run_with_batches(own, given, list(iterators))
            self._waiting.append((taking, list(iterators.values())))
            return RemoteValue(self._job.pool.queue.result, taking, rebuild)
        program = self._steps.program(own, *given)
        self._job.place(program)
        future = self._job.run(program.step, self._steps.arrays(*given))
        return RemoteValue(
            self._job.pool.queue.result, future, lambda done: program.step.result.rebuild(done.arrays)
        )

    def _run_with_batches(
        self,
        fn: Callable[..., object],
        given: tuple[tuple[object, ...], dict[str, object]],
        iterators: list[str],
    ) -> tuple[Future[RunResult], Callable[[RunResult], PyTree]]:
        """Schedule a call with iterators of the workers; return what it will compute, and what that means."""
        example = _with_specs(given, iterators, [()] * len(iterators))
        call = Call.parse(*example)
        key = identity_of(fn), call.signature
        if key not in self._functions:

            def make(specs: list[PyTree]) -> FunctionProgram:
                return self._steps.program(fn, *_with_specs(example, iterators, specs))

            self._functions[key] = ScheduledFunction(self._job, "function", make, len(iterators))
        function = self._functions[key]
        return function.run(iterators, [_canonical(array) for array in call.arrays]), function.rebuild

    def join(self) -> None:
        """Wait until every scheduled function has run. Ctrl-C cancels those that no worker has begun.

        Raises:
            Exception: the first error of a function, once.
        """
        try:
            self._job.pool.queue.join()
        except KeyboardInterrupt:
            self._job.pool.leave(0, drops=True)
            raise
        finally:
            self._drop_iterators()

    def done(self) -> bool:
        """Return whether every scheduled function has run.

        Raises:
            Exception: the first error of a function, once, when none runs any more.
        """
        self._drop_iterators()
        return self._job.pool.queue.done()

    def fetch(self, val: PyTree) -> PyTree:
        """Wait for results, and return them with NumPy arrays.

        Args:
            val: a `RemoteValue`, or a structure of them and other values.
        """
        return jax.tree.map(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else _here(leaf), val)

    def create_per_worker_dataset(self, dataset_fn: object) -> PerWorkerValues:
        """Let every worker make a dataset of its own.

        The data are not divided between the workers, unless the function does it.

        Args:
            dataset_fn: a function without arguments, or of an `InputContext` with the worker's number; it
                returns an iterable of batches. Or a `unisono.data.Dataset`. Workers get it by `cloudpickle`.

        Raises:
            InvalidTypeError: it is neither, or cannot be sent.
        """
        name = f"dataset {next(_NUMBERS)}"
        self._job.pool.make_dataset(name, pickled(dataset_maker(dataset_fn)))
        return PerWorkerValues(self._job.pool, name)

    def _drop_iterators(self) -> None:
        """Let go of the iterators of calls that have ended.

        Here, and not where a call ends: workers get the request to forget one under a lock of the pool, for
        which the thread that ends a call must not wait.
        """
        while self._waiting and self._waiting[0][0].done():
            self._waiting.popleft()


def _with_specs(given: Given, iterators: Sequence[str], specs: Sequence[PyTree]) -> Given:
    """Return arguments with what stands for the workers' iterators, by their place in the call."""
    place = {name: number for number, name in enumerate(iterators)}

    def stand_in(leaf: object) -> object:
        if not isinstance(leaf, (PerWorkerIterator, WorkerIterator)):
            return leaf
        number = place[leaf.name] if isinstance(leaf, PerWorkerIterator) else leaf.number
        return WorkerIterator(number, jax.tree.map(_canonical_spec, specs[number]))

    changed: Given = jax.tree.map(stand_in, given)
    return changed


def _canonical_spec(spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, jax.dtypes.canonicalize_dtype(spec.dtype))


def _canonical(array: object) -> np.ndarray:
    host = np.asarray(array)
    return np.asarray(host, jax.dtypes.canonicalize_dtype(host.dtype))


def _here(leaf: object) -> object:
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def _python_function(fn: object) -> Callable[..., object]:
    """Return the Python function behind a `unisono.function`, also behind a method that is one."""
    if isinstance(fn, Function):
        return fn.python_function
    if isinstance(fn, BoundFunction):
        return functools.partial(fn.function.python_function, *fn.args)
    raise InvalidTypeError(
        f"`schedule` takes a `unisono.function`. Received: {fn!r}. Decorate it with `@unisono.function`."
    )
