"""A user's function as a program of workers: what `ClusterCoordinator.schedule` is given.

The function is traced on the chief. Batches that it takes with `next` from a worker's iterator are arguments
of its program, in the order in which it takes them; `strategy.run`, `reduce` and `local_results` in it mean
one replica.

Tests: tests/virtual/parameter_server/chief/test_function_step.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import Context
from unisono._errors import ContextError, InvalidArgumentError
from unisono._reads import DataIterator, current_reader
from unisono._system._blocks import set_for_block
from unisono._types import PyTree, UserValue
from unisono.parameter_server.programs._push_layout import PushTrace, push_layout_of, pushing
from unisono.parameter_server.programs._worker_program import (
    Destination,
    WorkerProgram,
    array_specs,
    make_program,
)
from unisono.step._call_signature import Call, Kind
from unisono.step._functional import discover
from unisono.step._identity import identity_of
from unisono.step._program import Program, Run, current_frame
from unisono.step._scope import StateScope

if TYPE_CHECKING:
    from unisono.strategies._replicated import ReplicatedStrategy


class WorkerIterator(DataIterator):
    """Stands for the iterator of each worker among the arguments of a scheduled function.

    Args:
        number: of the per-worker dataset; the same dataset twice is the same iterator.
        spec: shapes and types of a batch, as one replica gets it; pytree of `jax.ShapeDtypeStruct`.
    """

    def __init__(self, number: int, spec: PyTree) -> None:
        self.number, self.spec = number, spec

    def __iter__(self) -> WorkerIterator:
        # A loop in a traced function would never end: each `next` is one more argument of its program.
        if (reader := current_reader()) is not None:
            reader.iterate(self)
        return self

    def __next__(self) -> PyTree:
        reader = current_reader()
        if reader is None:
            raise ContextError(
                "The iterator of a per-worker dataset can be read on workers alone. Received: `next` on the "
                "coordinator. Pass it to the function that you give to `coordinator.schedule`."
            )
        return reader.read(self, lambda: None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkerIterator) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @functools.cached_property
    def _key(self) -> Hashable:
        leaves, structure = jax.tree.flatten(self.spec)
        return self.number, structure, tuple((tuple(x.shape), str(x.dtype)) for x in leaves)


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionProgram:
    """A user's function as a program of workers.

    The program's arrays are those of the call, then those of the batches in the order of `reads`.

    Args:
        reads: for each batch that the function takes: the number of its dataset.
        variables: all that the function has touched.
    """

    step: WorkerProgram
    reads: tuple[int, ...]
    variables: tuple[keras.Variable, ...]


def traced_worker_index() -> jax.Array | None:
    """Return the number of the worker that will run the function which is traced; None where none is.

    It is an argument of the program, which is the same on all workers.
    """
    trace = _TRACED.get()
    if trace is None:
        return None
    trace.asks_worker = True
    return jnp.zeros((), _INDEX.dtype) if trace.worker is None else trace.worker


class FunctionSteps:
    """The programs of users' functions: one for each signature of a call.

    Args:
        strategy: of one replica, with a `PushLayout`.
    """

    def __init__(
        self,
        strategy: ReplicatedStrategy,
        destination: Destination | None = None,
    ) -> None:
        self._strategy = strategy
        self._destination = destination
        self._layout = push_layout_of(strategy)
        #: By signature.
        self._programs: dict[Hashable, FunctionProgram] = {}

    @property
    def num_programs(self) -> int:
        """How many programs were made."""
        return len({id(program) for program in self._programs.values()})

    def program(
        self,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> FunctionProgram:
        """Return the program of a call.

        Args:
            fn: may read and write variables, use tapes, `strategy.run`, `reduce` and optimizers.
            args: arrays, numbers, other objects, `WorkerIterator`s, and `jax.ShapeDtypeStruct` for arrays
                that are not here.

        Raises:
            UnsupportedError: for a function that no worker can run by itself.
        """
        call = Call.parse(*jax.tree.map(_stand_in, (tuple(args), dict(kwargs or {}))))
        key = (identity_of(getattr(fn, "python_function", fn)), call.signature)
        if key not in self._programs:
            self._programs[key] = self._make(_FunctionTrace(fn, call, self._strategy))
        return self._programs[key]

    def arrays(self, args: Sequence[object], kwargs: Mapping[str, object] | None = None) -> list[Any]:
        """Return the arrays of a call, as its program takes them before those of the batches."""
        return Call.parse(tuple(args), dict(kwargs or {})).arrays

    def _make(self, trace: _FunctionTrace) -> FunctionProgram:
        with pushing(PushTrace()) as push:
            trace.discover()
        noted = {id(v) for notes in push.notes for v in notes.variables}
        variables = [v for v in trace.scope.seen.values() if id(v) not in noted]
        batches = trace.reader.batches
        leaves = [leaf for batch in batches for leaf in jax.tree.leaves(batch)]
        arrays = [*map(_spec_of, trace.call.arrays), *array_specs(leaves)]
        index = len(arrays)
        if trace.asks_worker:
            arrays.append(_INDEX)
        step = make_program(
            lambda values, given: trace.body(variables, values, given),
            variables,
            push.notes,
            arrays,
            self._destination,
        )
        if index in step.arrays:
            step = dataclasses.replace(step, worker=index)
        return FunctionProgram(step, tuple(trace.reader.numbers), tuple(variables))


class _FunctionTrace:
    """Traces one function: first to learn what it touches and reads, then as a program."""

    def __init__(self, fn: Callable[..., object], call: Call, strategy: ReplicatedStrategy) -> None:
        self._fn, self.call, self._strategy = fn, call, strategy
        #: Whether the function has asked for the number of its worker, which is then the last array.
        self.asks_worker = False
        self.worker: jax.Array | None = None
        #: What the function has touched when it was traced last.
        self.scope = StateScope()
        self.reader = _BatchReader()

    def discover(self) -> None:
        """Trace the function without computing, and initialize the variables that it creates."""
        discover(lambda arrays: self._run([], arrays), self.call.arrays)

    def body(
        self, variables: Sequence[keras.Variable], values: list[jax.Array], arrays: list[jax.Array]
    ) -> tuple[UserValue, Mapping[int, Any]]:
        """Return the function's result and what it wrote; traced."""
        count = len(self.call.arrays)
        if self.asks_worker:
            self.worker = arrays[-1]
        leaves = iter(arrays[count:])
        self.reader.given = [jax.tree.map(lambda _: next(leaves), spec) for spec in self.reader.batches]
        result = self._run(list(zip(variables, values, strict=True)), arrays[:count])
        scope = self.scope
        # A variable with a value for each replica has one of them.
        new = {
            key: scope.copies[key][0] if key in scope.copies else scope.state_mapping[key]
            for key in scope.written
        }
        return result, new

    def _run(self, pairs: list[tuple[keras.Variable, jax.Array]], arrays: Sequence[Any]) -> UserValue:
        args, kwargs = self.call.rebuild(arrays, _of_one_replica)

        def body() -> UserValue:
            result = self._fn(*args, **kwargs)
            # Read here, where the variables have the values that the function has given them.
            return jax.tree.map(lambda x: x.value if isinstance(x, keras.Variable) else x, result)

        context = Context(self._strategy)
        program = Program([body], [lambda: StateScope(pairs)], [lambda _: context], self.reader)
        with set_for_block(_TRACED, self):
            result, frame = Run(program).complete(0)
        self.scope = frame.scope
        return result


def not_a_workers(what: str) -> InvalidArgumentError:
    """Return the error for an iterator that the chief has made, and not the workers."""
    return InvalidArgumentError(
        "A scheduled function must take its batches from the iterator of a per-worker dataset, which each "
        f"worker makes for itself. Received: {what} an iterator that this process has made. Write `iterator "
        "= iter(coordinator.create_per_worker_dataset(dataset))`, and `schedule(fn, args=(iterator,))`."
    )


class _BatchReader:
    """Gives a traced function stand-ins for the batches that it takes from workers' iterators."""

    def __init__(self) -> None:
        #: The specs of the batches, and the numbers of their datasets, in the function's order.
        self.batches: list[PyTree] = []
        self.numbers: list[int] = []
        #: The batches as a program gets them; None while the function is traced for the first time.
        self.given: list[PyTree] | None = None

    def iterate(self, source: object) -> NoReturn:
        """Refuse: a program has no loop over data."""
        raise InvalidArgumentError(
            "A scheduled function must take its batches with `next` from the iterator of a per-worker "
            f"dataset. Received: a loop over a {type(source).__name__}. Write `batch = next(iterator)`, and "
            "schedule the function once for each step."
        )

    def read(self, source: object, advance: Callable[[], Any]) -> PyTree:
        """Return the next batch of an iterator.

        Raises:
            InvalidArgumentError: for data that are not a worker's.
            ContextError: for a function that takes other batches than before.
        """
        frame = current_frame()
        if not isinstance(source, WorkerIterator) or frame is None:
            raise not_a_workers("`next` of")
        number = len(frame.reads)
        frame.reads.append(source.number)
        if self.given is None:
            # Once more where the function is executed again for a derivative.
            if number == len(self.batches):
                self.batches.append(source.spec)
                self.numbers.append(source.number)
            return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), source.spec)
        if self.numbers[number : number + 1] != [source.number]:
            raise ContextError(
                "A function must take the same batches each time it is traced. Received: one that took "
                "others the second time. Do not let random numbers or the clock decide about `next`."
            )
        return self.given[number]


#: The number of a worker, as its programs take it.
_INDEX = jax.ShapeDtypeStruct((), np.dtype(np.int32))

_TRACED: ContextVar[_FunctionTrace | None] = ContextVar("unisono_function_trace", default=None)


def _stand_in(leaf: object) -> UserValue:
    """Return an array without memory for the shape and type of one that is not here."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return leaf


def _spec_of(array: Any) -> jax.ShapeDtypeStruct:
    """Return shape and type of an argument; a Python number takes the type of what it is combined with."""
    weak = isinstance(array, float) or bool(getattr(array, "weak_type", False))
    dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(array))
    return jax.ShapeDtypeStruct(np.shape(array), dtype, weak_type=weak)


def _of_one_replica(kind: Kind, part: tuple[Any, ...]) -> Any:
    return part[0][0] if kind is Kind.SPLIT else part[0]
