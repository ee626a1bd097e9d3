"""`fit` and `evaluate` with data that each worker makes for itself, from a function of an `InputContext`.

Keras' loop on the chief counts steps; its batches are one batch of the chief's own dataset, again and again,
from which Keras learns shapes. What a step computes with is the next batch of the worker that runs it.

Tests: tests/virtual/strategies/test_parameter_server_data.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from unisono._system._pickling import pickle_by_value
from unisono._types import PyTree
from unisono.data._sharding import DatasetCreator, InputContext
from unisono.parameter_server.chief._fit_callbacks import EpochNumbers, epoch_callbacks
from unisono.parameter_server.chief._job import Job
from unisono.parameter_server.chief._scheduled_function import ScheduledFunction
from unisono.parameter_server.chief._workers import RunResult
from unisono.parameter_server.programs._function_step import FunctionProgram
from unisono.parameter_server.server._traffic import StepTally
from unisono.parameter_server.worker._step_worker import as_worker
from unisono.step._keras_internals import is_validation
from unisono.step.functions._function import Function

if TYPE_CHECKING:
    from unisono.data._dataset import Dataset

_NUMBERS = itertools.count()

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

#: Arguments of `fit` and `evaluate` that say what the batches themselves must hold.
_IN_BATCHES = ("y", "sample_weight", "class_weight", "batch_size", "validation_split")


def makes_data(value: object) -> bool:
    """Return whether an argument of `fit` is a function that makes data, and not data.

    >>> makes_data(lambda context: []), makes_data(np.ones(3)), makes_data(None)
    (True, False, False)
    """
    return callable(value) and not any(hasattr(value, name) for name in ("__iter__", "__getitem__"))


class WorkerDatasets:
    """The workers' datasets of one argument of `fit` or `evaluate`."""

    def __init__(self, job: Job, function: object) -> None:
        number = next(_NUMBERS)
        self._job = job
        self._dataset = f"dataset of fit {number}"
        job.pool.make_dataset(self._dataset, pickled(make := dataset_maker(function, gives_context=True)))
        with as_worker(0):
            self._example = _first(make(InputContext(job.num_workers, 0, 1)))
        self._function: ScheduledFunction | None = None
        #: The workers' name of the iterator.
        self._iterator = ""
        self.restart()

    def restart(self) -> None:
        """Begin each worker's dataset again."""
        self._forget_iterator()
        self._iterator = f"iterator of fit {next(_NUMBERS)}"
        self._job.pool.iterate(self._iterator, self._dataset)

    def forget(self) -> None:
        """Let the workers drop their datasets."""
        self._forget_iterator()
        self._job.pool.forget(self._dataset)

    def _forget_iterator(self) -> None:
        if self._iterator:
            self._job.pool.forget(self._iterator)

    @property
    def examples(self) -> Iterator[PyTree]:
        """What Keras gets: one batch, for ever."""
        return (self._example for _ in itertools.count())

    def run(
        self, make: Callable[[PyTree], FunctionProgram], tally: StepTally | None = None
    ) -> Future[RunResult]:
        """Schedule the step with a worker's next batch; return its result, later."""
        if self._function is None:
            self._function = ScheduledFunction(self._job, "step", lambda specs: make(specs[0]))
        return self._function.run([self._iterator], tally=tally)


class RunningCalls:
    """What the calls of `fit` and `evaluate` that run now have: data of workers, and counts of steps."""

    def __init__(self, job: Job) -> None:
        self._job = job
        #: Of the innermost call; None where the chief's pipeline gives the batches.
        self.current: WorkerDatasets | None = None
        #: What the training steps of the innermost `fit` cost; None in other methods.
        self.tally: StepTally | None = None
        #: What shows it, in the innermost `fit`.
        self.numbers: EpochNumbers | None = None
        self._validation: WorkerDatasets | None = None

    @contextlib.contextmanager
    def around_method(self) -> Iterator[None]:
        """Surround each call of a method, whose steps are left where it raises.

        Within a callback, the outer call's data are not its own.
        """
        before, self.current = self.current, None
        tally, self.tally = self.tally, None
        try:
            with self._job.around_call():
                yield
        finally:
            self.current, self.tally = before, tally

    @contextlib.contextmanager
    def around_fit(self, arguments: dict[str, object]) -> Iterator[tuple[dict[str, object], bool]]:
        """Surround `fit`, inside of `around_method`.

        Raises:
            InvalidArgumentError: the number of steps is missing, or there are other data beside a function.
        """
        before = self._validation
        with contextlib.ExitStack() as stack:
            stack.enter_context(epoch_callbacks(arguments["callbacks"]))
            # The outer call's again, where a callback calls `fit`.
            stack.callback(setattr, self, "_validation", before)
            stack.callback(setattr, self, "numbers", self.numbers)
            self._validation, self.tally = None, StepTally()
            self.numbers = EpochNumbers(self.tally)
            arguments = dict(arguments)
            if makes_data(arguments["validation_data"]):
                _check(arguments, "validation_data", "validation_steps", ())
                data = self._made(stack, arguments["validation_data"])
                arguments["validation_data"] = data.examples
                self._validation = data
            if not makes_data(arguments["x"]):
                yield arguments, False
                return
            _check(arguments, "x", "steps_per_epoch", _IN_BATCHES)
            data = self._made(stack, arguments["x"])
            stack.enter_context(self._job.streams.ahead())
            self.current = data
            yield {**arguments, "x": data.examples, "shuffle": False}, False
            self._job.pool.queue.join()

    @contextlib.contextmanager
    def around_test(self, name: str, arguments: dict[str, object]) -> Iterator[dict[str, object]]:
        """Surround `evaluate` or `predict`, inside of `around_method`.

        Raises:
            InvalidArgumentError: as `around_fit` does.
            UnsupportedError: for `predict` with data of the workers.
        """
        with contextlib.ExitStack() as stack:
            if is_validation(arguments) and self._validation is not None:
                self._validation.restart()
                self.current = self._validation
            elif makes_data(arguments.get("x")):
                if name == "predict":
                    raise UnsupportedError(
                        "`predict` needs data whose order is known, to return a row for each. Received: a "
                        "function that makes data on each worker. Write `predict(dataset_fn(context))`."
                    )
                _check(arguments, "x", "steps", _IN_BATCHES)
                self.current = self._made(stack, arguments["x"])
                arguments = {**arguments, "x": self.current.examples}
            if self.current is not None:
                stack.enter_context(self._job.streams.ahead())
            yield arguments

    def _made(self, stack: contextlib.ExitStack, function: object) -> WorkerDatasets:
        data = WorkerDatasets(self._job, function)
        stack.callback(data.forget)
        return data


def _check(arguments: Mapping[str, object], name: str, steps: str, others: tuple[str, ...]) -> None:
    beside = [other for other in others if arguments.get(other) not in (None, 0.0)]
    if not arguments.get(steps) or beside:
        raise InvalidArgumentError(
            "Data that workers make need the number of steps, and hold batches of inputs, targets and "
            f"perhaps weights themselves. Received: a function as `{name}`, {steps}={arguments.get(steps)!r}"
            f"{', and ' + ', '.join(beside) if beside else ''}. Write "
            f"`{'evaluate' if steps == 'steps' else 'fit'}(..., {steps}=100)`, and put what belongs to the "
            "rows into the batches."
        )


def _first(dataset: Any) -> PyTree:
    if not hasattr(dataset, "__iter__"):
        raise InvalidTypeError(
            "The function that makes the workers' data must return a dataset of batches. Received: "
            f"{type(dataset).__name__}. Return a `unisono.data.Dataset`, or another iterable."
        )
    batches = dataset.as_numpy_iterator() if hasattr(dataset, "as_numpy_iterator") else iter(dataset)
    first = next(iter(batches), None)
    if first is None:
        raise InvalidArgumentError(
            "The function that makes the workers' data must return a dataset with batches. Received: an "
            "empty one."
        )
    return jax.tree.map(np.asarray, first)


def dataset_maker(dataset: object, gives_context: bool = False) -> Callable[[InputContext], Any]:
    """Return what makes a dataset, given an `InputContext`.

    Args:
        dataset: a function without arguments or of an `InputContext`, an object that can be called, or a
            dataset.
        gives_context: whether a function that may be called without arguments gets the context, too.

    Raises:
        InvalidTypeError: it is neither.
    """
    if isinstance(dataset, DatasetCreator):
        dataset, gives_context = dataset.dataset_fn, True
    if isinstance(dataset, Function):
        dataset = dataset.python_function
    if callable(dataset):
        return dataset if _takes_context(dataset, gives_context) else lambda context: dataset()
    # Imported where it is used: a chief without datasets does without Grain.
    from unisono.data._dataset import Dataset

    if isinstance(dataset, Dataset):
        return functools.partial(_in_own_order, dataset)
    if isinstance(dataset, Iterable):
        return lambda context: dataset
    raise InvalidTypeError(
        "A per-worker dataset is made by a function, or is an iterable of batches. "
        f"Received: {type(dataset).__name__}. Write `create_per_worker_dataset(lambda: dataset)`."
    )


def pickled(make: Callable[[InputContext], Any]) -> bytes:
    """Return a function as bytes, by `cloudpickle`.

    Raises:
        InvalidTypeError: it cannot be pickled.
    """
    try:
        return pickle_by_value(make)
    except Exception as error:
        raise InvalidTypeError(
            "What makes a per-worker dataset must be pickled to reach the workers. "
            f"Received: {make!r}, which cannot be ({type(error).__name__}: {error}). Open files and the "
            "like inside of the function."
        ) from error


def _in_own_order(dataset: Dataset, context: InputContext) -> Dataset:
    """Return a dataset with other orders on each worker, the same whenever that worker is started."""
    from unisono.data._rewrite import shuffle_seeds, with_common_seed

    drawn = shuffle_seeds(dataset, drawn=True)
    worker = context.input_pipeline_id
    return with_common_seed(dataset, (drawn[0] + (worker << 32)) % 2**64) if drawn and worker else dataset


def _takes_context(function: Callable[..., Any], also_optional: bool) -> bool:
    """Return whether a function has a positional parameter: without a default, or any."""
    return any(
        (p.kind in _POSITIONAL and (also_optional or p.default is p.empty))
        or (p.kind is p.VAR_POSITIONAL and also_optional)
        for p in inspect.signature(function).parameters.values()
    )
