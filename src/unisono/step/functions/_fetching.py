"""Data that a `unisono.function` reads: fetched outside of its trace.

Batches that a function takes with `next` from iterators among its arguments become arguments of its
program. Whatever else reads data (a loop over a data set, an iterator of a closure, a call of `next`
in a loop) cannot be a part of one program: the function's body then runs as plain Python.

Tests: tests/virtual/step/test_function_data.py.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import CellType, FrameType
from typing import Any, NoReturn

import jax
import keras
import numpy as np

from unisono._reads import DataIterator, DataSet, current_reader, note_iteration, read_by
from unisono._types import PyTree, Tree
from unisono.step._call_signature import Call, Kind
from unisono.step._program import CallSite, Run, current_frame

#: Arguments that can be iterated without being a source of data.
_NO_DATA = (Sequence, Mapping, Set, type, io.IOBase, np.generic, keras.Variable)

#: A variable of an outer function that has no value yet.
_EMPTY_CELL = CellType()

#: Functions below a traced function on the stack.
_BOTTOM = (Run.complete.__code__, Run.operand_at.__code__)


class EndOfData(enum.Enum):
    """Stands for the batch after the last one."""

    END = "end"


class TraceStop(BaseException):
    """Ends a trace that cannot continue; not an `Exception`, so that the function does not catch it."""


class DataFailure(TraceStop):
    """Ends a call whose data raised an error, so that what the function does before that batch is done."""


@dataclasses.dataclass(frozen=True, eq=False)
class UnreadBatch:
    """Stands for a batch that could not be read."""

    error: Exception


class ForeignIterator(DataIterator):
    """An iterator of another library, whose reads would not be seen."""

    def __init__(self, iterator: Iterator[object]) -> None:
        self.iterator = iterator

    def __iter__(self) -> ForeignIterator:
        note_iteration(self)
        return self

    def __next__(self) -> PyTree:
        reader = current_reader()
        return next(self.iterator) if reader is None else reader.read(self, lambda: next(self.iterator))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.iterator, name)


@dataclasses.dataclass(frozen=True)
class _CallSite:
    """Stands for an iterator in the signature of a call: any iterator of its type may be there."""

    index: int
    kind: type


@dataclasses.dataclass(frozen=True, eq=False)
class Sources:
    """What a function can read data from among its arguments.

    Args:
        iterators: each once, in the order of the arguments, as its own self or `ForeignIterator`.
        places: which of them stands for an argument, by the argument's id.
        key: the types of all sources, and where they are.
        must_loop: whether one of them is an iterable of another library, whose reads are not seen.
    """

    iterators: tuple[Any, ...]
    places: dict[int, _CallSite]
    key: tuple[tuple[int, type], ...]
    must_loop: bool

    @classmethod
    def of(cls, call: Call) -> Sources | None:
        """Return the sources among the arguments of a call, or None where there is none."""
        found = [
            (i, static)
            for i, (kind, static) in enumerate(zip(call.kinds, call.statics, strict=True))
            if kind is Kind.STATIC and _is_source(static)
        ]
        if not found:
            return None
        iterators = {id(s): s for _, s in found if isinstance(s, Iterator)}
        return cls(
            tuple(s if isinstance(s, DataIterator) else ForeignIterator(s) for s in iterators.values()),
            {key: _CallSite(i, type(s)) for i, (key, s) in enumerate(iterators.items())},
            tuple((i, type(s)) for i, s in found),
            any(not isinstance(s, (Iterator, DataSet)) for _, s in found),
        )

    def call_with(self, arguments: PyTree, batches: Sequence[tuple[object, object]]) -> Call:
        """Return a call with batches, whose signature holds for other iterators too."""
        return Call.parse((*self._abstracted(arguments), [batch for _, batch in batches]), {})

    def passed(self, arguments: Tree) -> Tree:
        """Return `(args, kwargs)` with iterators whose reads are seen."""
        return self.restored(self._abstracted(arguments))

    def _abstracted(self, tree: Tree) -> Tree:
        abstracted: Tree = jax.tree.map(lambda leaf: self.places.get(id(leaf), leaf), tree)
        return abstracted

    def restored(self, tree: Tree) -> Tree:
        """Return a structure with the iterators in place of what stands for them."""
        restored: Tree = jax.tree.map(
            lambda leaf: self.iterators[leaf.index] if isinstance(leaf, _CallSite) else leaf, tree
        )
        return restored

    def fetch(self, index: int) -> PyTree:
        """Return the next batch of an iterator, `EndOfData.END`, or `UnreadBatch`."""
        try:
            return next(self.iterators[index], EndOfData.END)
        except Exception as error:  # raised where the function reads the batch
            return UnreadBatch(error)


def _is_source(static: object) -> bool:
    if isinstance(static, (DataIterator, DataSet, keras.utils.PyDataset)):
        return True
    return isinstance(static, Iterable) and not isinstance(static, _NO_DATA)


class DataReader:
    """The reader of a trace: gives the batches that were fetched, as the program gets them.

    Args:
        batches: stand-ins for the batches, in the order in which the function takes them.
    """

    def __init__(self, sources: Sources | None, batches: Sequence[object]) -> None:
        self._iterators = sources.iterators if sources else ()
        self._batches = batches
        #: Whether the function reads data as no program can.
        self.must_loop = False
        #: Of which iterator the function takes one more batch, if it does.
        self.needs: int | None = None
        #: Whether the function knows that its data have ended.
        self.has_ended = False

    @property
    def is_interrupted(self) -> bool:
        """Whether the trace was ended, even where the function stopped the exception by a bare `except`."""
        return self.must_loop or self.needs is not None

    def iterate(self, source: object) -> None:
        """Refuse: a program has no loop over data.

        Raises:
            TraceStop: always.
        """
        self._refuse()

    def read(self, source: object, advance: Callable[[], object]) -> PyTree:
        """Return the next batch of those that were fetched.

        Raises:
            StopIteration: where the data had ended.
            TraceStop: where more must be fetched, or the body must run as plain Python.
        """
        frame = current_frame()
        index = next((i for i, known in enumerate(self._iterators) if known is source), None)
        if frame is None or frame.run.program.reader is not self or index is None:
            # A closure's iterator may be another one at the next call.
            self._refuse()
        site = _call_site(sys._getframe(1))
        # The same instruction again is a loop, whose rounds may be others at the next call.
        if site in frame.reads:
            self._refuse()
        number = len(frame.reads)
        frame.reads.append(site)
        if number == len(self._batches):
            self.needs = index
            raise TraceStop
        batch = self._batches[number]
        if batch is EndOfData.END:
            self.has_ended = True
            # As at the end of a real iterator, which the function may expect.
            raise StopIteration
        return batch

    def _refuse(self) -> NoReturn:
        self.must_loop = True
        raise TraceStop


def _call_site(frame: FrameType | None) -> CallSite:
    """From where a batch is read: the instruction in each function on the stack."""
    site = []
    while frame is not None and frame.f_code not in _BOTTOM:
        site.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(site)


class BatchReplay:
    """The reader of a body that runs as plain Python, after a trace has fetched its first batches.

    Args:
        batches: pairs of an iterator and a batch that was fetched from it.
    """

    def __init__(self, batches: Sequence[tuple[object, object]]) -> None:
        self._waiting: dict[int, collections.deque[object]] = collections.defaultdict(collections.deque)
        for iterator, batch in batches:
            self._waiting[id(iterator)].append(batch)

    def iterate(self, source: object) -> None:
        """Let it begin."""

    def read(self, source: object, advance: Callable[[], object]) -> PyTree:
        """Return a batch that was fetched before, then those of the source."""
        waiting = self._waiting.get(id(source))
        if not waiting:
            return advance()
        batch = waiting.popleft()
        if batch is EndOfData.END:
            raise StopIteration
        if isinstance(batch, UnreadBatch):
            raise batch.error
        return batch


def call_in_python(fn: Callable[[], object], batches: Sequence[tuple[object, object]]) -> PyTree:
    """Run a function's body as plain Python; return what the compiled function would."""
    with read_by(BatchReplay(batches)) if batches else contextlib.nullcontext():
        result = fn()
    return jax.tree.map(lambda leaf: leaf.value if isinstance(leaf, keras.Variable) else leaf, result)


def closes_over_iterator(fn: Callable[..., object]) -> bool:
    """Return whether a function's own code names an iterator of another library, such as a generator.

    Its reads are not seen: a program would hold the batches that the trace has read.

    >>> numbers = iter([1, 2])
    >>> closes_over_iterator(lambda: next(numbers)), closes_over_iterator(lambda: 1)
    (True, False)
    """
    code = getattr(fn, "__code__", None)
    if code is None:
        return False
    outer, cells = getattr(fn, "__globals__", {}), getattr(fn, "__closure__", None) or ()
    named = [outer[name] for name in code.co_names if name in outer]
    # An empty cell raises where its contents are read.
    named += [cell.cell_contents for cell in cells if cell != _EMPTY_CELL]
    return any(isinstance(x, Iterator) and not isinstance(x, (DataIterator, *_NO_DATA)) for x in named)


def is_traceable(batch: PyTree) -> bool:
    """Return whether a program can take a batch: strings and dates it cannot."""
    on_host = (x for x in jax.tree.leaves(batch) if isinstance(x, (np.ndarray, np.generic, str, bytes)))
    return not any(np.asarray(x).dtype.kind in "OSUmM" for x in on_host)
