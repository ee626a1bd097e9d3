"""What happens when code reads from a data set: normally its next batch is read.

While a function is traced, a batch that is read would become a constant of its program. Whoever
traces sets a `Reader`, which is asked in place of the source.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NoReturn, Protocol

from unisono._errors import InvalidArgumentError


class DataSet:
    """Marks what gives a new iterator over batches at each `iter`."""

    __slots__ = ()


class DataIterator:
    """Marks what gives the next batch at each `next`."""

    __slots__ = ()


class Reader(Protocol):
    """What is asked in place of a source."""

    def iterate(self, source: Any) -> None:
        """Allow or forbid that an iteration over a data set or an iterator begins."""

    def read(self, source: Any, advance: Callable[[], Any]) -> Any:
        """Return the next batch of an iterator; `advance` reads it from the source.

        Raises:
            StopIteration: at the end.
        """


_READER: ContextVar[Reader | None] = ContextVar("unisono_reader", default=None)


def current_reader() -> Reader | None:
    """The reader that stands in for all sources, if one does."""
    return _READER.get()


@contextlib.contextmanager
def read_by(reader: Reader | None) -> Iterator[None]:
    """Let `reader` stand in for all sources for a block; None lets them be read."""
    token = _READER.set(reader)
    try:
        yield
    finally:
        _READER.reset(token)


def note_iteration(source: Any) -> None:
    """Tell the reader, if there is one, that an iteration over `source` begins."""
    reader = _READER.get()
    if reader is not None:
        reader.iterate(source)


class _NotInAStep:
    """Forbids to read data inside a step."""

    def iterate(self, source: Any) -> NoReturn:
        """Raise."""
        raise InvalidArgumentError(
            "Data must be read outside of a step: its program would see one batch for ever. Received: a read "
            f"from a {type(source).__name__} inside the step. Pass the batch to the step as an argument: "
            "`strategy.run(step, args=(next(iterator),))`."
        )

    def read(self, source: Any, advance: Callable[[], Any]) -> NoReturn:
        """Raise."""
        self.iterate(source)


#: The reader of the code in a step that is compiled.
NOT_IN_A_STEP = _NotInAStep()
