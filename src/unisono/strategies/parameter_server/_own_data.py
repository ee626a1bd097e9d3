"""`fit` with data that each worker makes for itself, from a function of an `InputContext`.

Keras' loop on the chief counts steps; its batches are one batch of the chief's own dataset, again and again,
from which Keras learns shapes. What a step computes with is the next batch of the worker that runs it.

Tests: tests/virtual/strategies/test_parameter_server_fit.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._types import PyTree, UserValue
from unisono.data._sharding import InputContext
from unisono.ps.scheduling._workers import BatchFunction
from unisono.ps.worker._batch_spec import rebuild
from unisono.strategies.parameter_server._job import Job
from unisono.training.pushed._worker_program import WorkerProgram

_NUMBERS = itertools.count()


@dataclasses.dataclass(eq=False)
class OwnData:
    """The workers' datasets of one call of `fit`.

    Args:
        job: the cluster.
        iterator: the workers' name of the iterator.
    """

    job: Job
    iterator: str

    def __post_init__(self) -> None:
        self.function = BatchFunction(f"step {next(_NUMBERS)}", (0,))
        #: By name of a plan: its program.
        self.programs: dict[str, WorkerProgram] = {}

    def trace_with(self, make: Callable[[PyTree], WorkerProgram]) -> None:
        """Note how the step's program for batches of a form is made.

        Args:
            make: gets shapes and types of a batch.
        """

        def trace(form: str) -> None:
            (batch,) = rebuild(form, lambda dtype, shape: jax.ShapeDtypeStruct(shape, dtype))
            program = make(batch)
            name = self.job.use(program, (self.function, form))
            self.programs[name] = program
            self.function.states = lambda: self.job.streams.take(program.streams)

        self.job.trace_with(self.function, trace)


@contextlib.contextmanager
def own_data(
    job: Job, arguments: dict[str, UserValue], pickled: Callable[[UserValue], bytes]
) -> Iterator[tuple[dict[str, UserValue], OwnData]]:
    """Let the workers make the data of a call of `fit`.

    Args:
        job: the cluster.
        arguments: of `fit`; `x` is a function of an `InputContext`.
        pickled: makes bytes of the function.

    Yields:
        The arguments for Keras, and the workers' data.

    Raises:
        InvalidArgumentError: without `steps_per_epoch`, or with other data beside the function.
    """
    others = [name for name in ("y", "sample_weight", "batch_size") if arguments.get(name) is not None]
    if not arguments.get("steps_per_epoch") or others:
        raise InvalidArgumentError(
            "Data that workers make need the number of steps of an epoch, and hold batches of inputs and "
            f"targets themselves. Received: steps_per_epoch={arguments.get('steps_per_epoch')!r}"
            f"{', and ' + ', '.join(others) if others else ''}. Write `fit(dataset_fn, steps_per_epoch=100)`."
        )
    number = next(_NUMBERS)
    dataset, iterator = f"dataset of fit {number}", f"iterator of fit {number}"
    job.pool.make_dataset(dataset, pickled(arguments["x"]))
    job.pool.iterate(iterator, dataset)
    example = _first(arguments["x"](InputContext(job.num_workers, 0, 1)))
    data = OwnData(job, iterator)
    try:
        yield {**arguments, "x": (example for _ in itertools.count()), "shuffle": False}, data
    finally:
        job.pool.forget(iterator)


def _first(dataset: Any) -> PyTree:
    batches = dataset.as_numpy_iterator() if hasattr(dataset, "as_numpy_iterator") else iter(dataset)
    first = next(iter(batches), None)
    if first is None:
        raise InvalidArgumentError(
            "The function that makes the workers' data must return a dataset with batches. Received: an "
            "empty one."
        )
    return jax.tree.map(np.asarray, first)
