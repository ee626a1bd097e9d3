"""Streams that yield or check a part of their elements: `take_while`, `scan`, `unique`, `ignore_errors`.

Tests: tests/unit/data/test_dataset_further.py.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._types import UserValue
from unisono.data._pipeline._cardinality import INFINITE
from unisono.data._pipeline._plan import (
    IndexedNode,
    Pass,
    PositionIterator,
    SelectiveNode,
    SourceIterator,
    UnaryNode,
    first_spec,
)
from unisono.data._pipeline._streams import ReplayIterator
from unisono.data._pipeline._structure import Element

_LOG = logging.getLogger("unisono")


class TakeWhile(SelectiveNode):
    """The elements before the first for which a predicate is false."""

    predicate: Callable[[Element], bool]

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        return _TakeWhileIterator(self.parent.iterate(run), self.predicate)


class _TakeWhileIterator(SourceIterator):
    kept = ("is_ended",)

    def __init__(self, source: grain.DatasetIterator, predicate: Callable[[Element], bool]) -> None:
        super().__init__(source)
        self._predicate = predicate
        self._is_ended = False

    def __next__(self) -> Element:
        # A further `next` must not read on: the source is already behind the element that ended the sequence.
        if not self._is_ended:
            element = next(self._source)
            if self._predicate(element):
                return element
            self._is_ended = True
        raise StopIteration


class Scan(UnaryNode):
    """The outputs of a function with a state."""

    initial: UserValue
    fn: Callable[[Any, Element], tuple[Any, Element]]

    @functools.cached_property
    def spec(self) -> Element:
        return first_spec(self)

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        # A state of `scan` may be any Python object, which JSON could not hold: a restored iterator computes
        # it again.
        return ReplayIterator(self.parent.iterate(run), self._scanned)

    def _scanned(self, source: Iterator[Element]) -> Iterator[Element]:
        state = self.initial
        for element in source:
            state, output = self.fn(state, element)
            yield output


class Unique(SelectiveNode):
    """The first of equal elements."""

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        # The set of seen elements grows with the data, so it is computed again instead of saved.
        return ReplayIterator(self.parent.iterate(run), _first_ones)


def _first_ones(source: Iterator[Element]) -> Iterator[Element]:
    seen: set[Any] = set()
    for element in source:
        key = element if isinstance(element, bytes) else _bytes_of(element)
        if key not in seen:
            seen.add(key)
            yield element


def _bytes_of(element: Element) -> bytes:
    if isinstance(element, (tuple, dict)) or element is None or np.asarray(element).dtype.hasobject:
        raise InvalidArgumentError(
            "The elements of unique() must be one component of numbers, or a string. "
            f"Received: {element!r:.200}. Choose the component with map() first."
        )
    # As bytes, because arrays cannot be hashed.
    return np.asarray(element).tobytes()


class IgnoreErrors(SelectiveNode):
    """The elements whose computation raises no error.

    Args:
        parent: The input; it may continue after an error.
    """

    log_warning: bool

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        if isinstance(self.parent, IndexedNode):
            return _IgnoreErrorsByPosition(self.parent, run, self.log_warning)
        return _IgnoreErrorsIterator(self.parent.iterate(run), self.log_warning)


class _IgnoreErrorsIterator(SourceIterator):
    def __init__(self, source: grain.DatasetIterator, log_warning: bool) -> None:
        super().__init__(source)
        self._log_warning = log_warning
        self._last: Exception | None = None

    def __next__(self) -> Element:
        while True:
            try:
                return next(self._source)
            except StopIteration:
                # The end of the data is not an error to skip.
                raise
            except Exception as error:
                if error is self._last:
                    # The same exception object again: the source has ended with it. Raise it, because to end
                    # quietly would lose the rest of the data.
                    raise
                self._last = error
                _note(error, self._log_warning)


class _IgnoreErrorsByPosition(PositionIterator):
    """Ignores errors of an indexed node: the next position can always be tried."""

    def __init__(self, node: IndexedNode, run: Pass, log_warning: bool) -> None:
        super().__init__(node, run)
        self._log_warning = log_warning

    def __next__(self) -> Element:
        while True:
            try:
                return super().__next__()
            except StopIteration:
                raise
            except Exception as error:
                _note(error, self._log_warning)
                # An element that raises is not tried again.
                self._next += 1


def _note(error: Exception, log_warning: bool) -> None:
    # As in tf.data, skipped elements are not reported by default.
    level = logging.WARNING if log_warning else logging.DEBUG
    _LOG.log(level, "ignore_errors() skipped an element: %s: %s", type(error).__name__, error)


class SizeCheck(UnaryNode, label="Counted"):
    """The same elements, with a check of their number."""

    size: int

    @property
    def cardinality(self) -> int:
        return self.size

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        return _SizeCheckIterator(self.parent.iterate(run), self.size)


class _SizeCheckIterator(SourceIterator):
    kept = ("given",)

    def __init__(self, source: grain.DatasetIterator, size: int) -> None:
        super().__init__(source)
        self._size = size
        self._given = 0

    def __next__(self) -> Element:
        try:
            element = next(self._source)
        except StopIteration:
            if self._size == INFINITE or self._given < self._size:
                raise self._error("no more") from None
            raise
        self._given += 1
        if self._size != INFINITE and self._given > self._size:
            raise self._error("more")
        return element

    def _error(self, how: str) -> InvalidArgumentError:
        # At "more than", the count already includes the element that is too many.
        given = min(self._given, self._size) if self._size >= 0 else self._given
        return InvalidArgumentError(
            f"The number of elements must be that of assert_cardinality({self._size}). "
            f"Received: {how} than {given}. Correct the number, or the data."
        )
