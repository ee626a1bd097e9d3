"""A hook for reads from data sets: `unisono.function` and `run` intercept those of the code that they trace.

A batch that traced code reads would become a constant of the compiled program. The tracer therefore sets a
`Reader`, which handles each read in place of the source.

Tests: tests/virtual/step/test_function_data.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import NoReturn, Protocol, TypeAlias

from unisono._errors import InvalidArgumentError
from unisono._system._blocks import set_for_block
from unisono._types import PyTree


class DataSet:
    """Base class of objects for which `iter` returns a new iterator over batches."""

    __slots__ = ()


class DataIterator:
    """Base class of objects for which `next` returns the next batch."""

    __slots__ = ()


DataSource: TypeAlias = DataSet | DataIterator


class Reader(Protocol):
    """Handles reads in place of their source."""

    def iterate(self, source: DataSource) -> None:
        """Allow the start of an iteration, or raise to forbid it."""

    def read(self, source: DataSource, advance: Callable[[], object]) -> PyTree:
        """Return the next batch of an iterator; `advance` reads it from the source.

        Raises:
            StopIteration: at the end.
        """


_READER: ContextVar[Reader | None] = ContextVar("unisono_reader", default=None)


def current_reader() -> Reader | None:
    """Return the reader that handles reads now, if there is one."""
    return _READER.get()


def read_by(reader: Reader | None) -> AbstractContextManager[object]:
    """Let `reader` handle all reads within the block; None restores direct reads."""
    return set_for_block(_READER, reader)


def note_iteration(source: DataSource) -> None:
    """Notify the reader, if there is one, of the start of an iteration over `source`."""
    reader = _READER.get()
    if reader is not None:
        reader.iterate(source)


class _ReadRejection:
    """Rejects reads inside a step."""

    def iterate(self, source: DataSource) -> NoReturn:
        """Raise an error."""
        raise InvalidArgumentError(
            "Data must be read outside of a step, whose compiled program would reuse one batch "
            f"in every call. Received: a read from a {type(source).__name__} inside the step. Pass the batch "
            "to the step as an argument: `strategy.run(step, args=(next(iterator),))`."
        )

    def read(self, source: DataSource, advance: Callable[[], object]) -> NoReturn:
        """Raise an error."""
        self.iterate(source)


#: The reader while a compiled step is traced.
NOT_IN_A_STEP = _ReadRejection()
