"""Results that come later, what every worker has its own one of, and which worker runs this code.

Tests: tests/virtual/test_coordinator.py.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from unisono._errors import ContextError
from unisono._types import PyTree
from unisono.parameter_server.programs._function_step import traced_worker_index
from unisono.parameter_server.worker._step_worker import current_worker_index

if TYPE_CHECKING:
    from unisono.parameter_server.chief._workers import RunResult, WorkerPool

_NUMBERS = itertools.count()


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
