"""Sources with random access by position, and the transformations that preserve it.

A transformation has the fields, cardinality and spec of the one for streams, and computes rows by position.

Tests: tests/unit/data/test_dataset_sources.py, tests/unit/data/test_dataset_transforms.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.data._pipeline import _cardinality, _structure
from unisono.data._pipeline._cardinality import INFINITE
from unisono.data._pipeline._plan import IndexedNode, Pass, first_spec
from unisono.data._pipeline._store import Store
from unisono.data._pipeline._streams import (
    StreamBatch,
    StreamConcatenate,
    StreamMap,
    StreamPaddedBatch,
    StreamReadAhead,
    StreamRepeat,
    StreamShuffle,
    StreamStride,
    StreamZip,
)
from unisono.data._pipeline._structure import Element


class Slices(IndexedNode):
    """The rows of arrays.

    Args:
        arrays: A structure of arrays with equal first dimensions.
    """

    arrays: Element
    files: bool = False

    @functools.cached_property
    def cardinality(self) -> int:
        return _structure.leading_size(self.arrays)

    @functools.cached_property
    def spec(self) -> Element:
        return _structure.unbatched_spec(_structure.spec_of(self.arrays))

    def rows(self, run: Pass, positions: np.ndarray) -> list[Element]:
        return [_structure.row(self.arrays, position) for position in positions.tolist()]

    def stacked(self, run: Pass, positions: np.ndarray) -> Element:
        return _structure.gather(self.arrays, positions)


class Range(IndexedNode):
    """The numbers `start, start + step, ...`."""

    start: int
    step: int
    size: int
    dtype: np.dtype[Any]

    @property
    def cardinality(self) -> int:
        return self.size

    @functools.cached_property
    def spec(self) -> Element:
        return _structure.TensorSpec((), self.dtype)

    def rows(self, run: Pass, positions: np.ndarray) -> list[Element]:
        return list(self.stacked(run, positions))

    def stacked(self, run: Pass, positions: np.ndarray) -> Element:
        return (self.start + self.step * positions).astype(self.dtype)


class Source(IndexedNode):
    """The records of an object that supports `len()` and indexing.

    Args:
        open_records: Opens the object; called once, on first use.
    """

    open_records: Callable[[], Sequence[Any]]

    @functools.cached_property
    def records(self) -> Sequence[Any]:
        return self.open_records()

    @functools.cached_property
    def cardinality(self) -> int:
        return len(self.records)

    def rows(self, run: Pass, positions: np.ndarray) -> list[Element]:
        # Records may be lists, strings and Python numbers, which become arrays by tf.data's rules.
        return [_structure.as_element(self.records[position]) for position in positions.tolist()]


class ElementList(IndexedNode, label="Held"):
    """Elements in memory.

    Args:
        elements: At least one.
    """

    elements: Sequence[Element]

    @property
    def cardinality(self) -> int:
        return len(self.elements)

    @functools.cached_property
    def spec(self) -> Element:
        return _structure.spec_of(self.elements[0])

    def rows(self, run: Pass, positions: np.ndarray) -> list[Element]:
        return [self.elements[position] for position in positions.tolist()]


class StoreSource(IndexedNode, label="Stored"):
    """The elements of a file that `save` wrote: record 0 is their spec."""

    store: Store

    @functools.cached_property
    def cardinality(self) -> int:
        # The store counts the record of the spec, too.
        return (self.store.size or 1) - 1

    @functools.cached_property
    def spec(self) -> Element:
        (written,) = self.store.get(0) or (None,)
        return _structure.map_leaves(_structure.spec_from_bytes, written)

    def rows(self, run: Pass, positions: np.ndarray) -> list[Element]:
        stored = [self.store.get(position + 1) for position in positions.tolist()]
        return [element for part in stored for element in part or ()]


class Map(IndexedNode, StreamMap):
    """A function applied to each element.

    Args:
        signature: Spec of the results, None where it is not known.
    """

    parent: IndexedNode
    signature: Element = None

    @functools.cached_property
    def spec(self) -> Element:
        return first_spec(self) if self.signature is None else self.signature

    @property
    def threads(self) -> int:
        return self.calls

    def rows(self, run: Pass, positions: np.ndarray) -> list[Element]:
        return [self.fn(element) for element in self.parent.rows(run, positions)]


class Stride(IndexedNode, StreamStride, label="Strided"):
    """The elements at `start, start + step, ...`, at most `limit` of them if it is not negative."""

    parent: IndexedNode
    limit: int = -1

    @functools.cached_property
    def cardinality(self) -> int:
        return _cardinality.taken(super().cardinality, self.limit)

    def rows(self, run: Pass, positions: np.ndarray) -> list[Element]:
        return self.parent.rows(run, self.start + self.step * positions)

    def stacked(self, run: Pass, positions: np.ndarray) -> Element:
        return self.parent.stacked(run, self.start + self.step * positions)


class Repeat(IndexedNode, StreamRepeat):
    """All elements `count` times, without end if it is negative; shuffles before it change each time."""

    parent: IndexedNode

    def rows(self, run: Pass, positions: np.ndarray) -> list[Element]:
        return [
            element
            for part in self._parts(positions)
            for element in self.parent.rows(*self._within(run, part))
        ]

    def stacked(self, run: Pass, positions: np.ndarray) -> Element:
        parts = self._parts(positions)
        return _structure.concatenated([self.parent.stacked(*self._within(run, part)) for part in parts])

    def _parts(self, positions: np.ndarray) -> list[np.ndarray]:
        """Split positions where the repetition changes, unless all repetitions are equal."""
        # Equal repetitions need no split: `_within` takes all positions modulo the size, in one gather.
        if not self.parent.varies:
            return [positions]
        # Positions need not grow: after a shuffle every change of the repetition begins a part.
        repetitions = positions // self.parent.cardinality
        return np.split(positions, np.flatnonzero(np.diff(repetitions)) + 1)

    def _within(self, run: Pass, part: np.ndarray) -> tuple[Pass, np.ndarray]:
        repetition, _ = divmod(int(part[0]), self.parent.cardinality)
        # The number of the repetition becomes part of the seed of each shuffle below.
        return run.at(repetition), part % self.parent.cardinality


class Concatenate(IndexedNode, StreamConcatenate):
    """The elements of a finite data set, then another's."""

    first: IndexedNode
    second: IndexedNode

    def rows(self, run: Pass, positions: np.ndarray) -> list[Element]:
        size = self.first.cardinality
        early = positions < size
        # One call for each part, which then looks up a shuffled order once and not for each row.
        firsts = iter(self.first.rows(run, positions[early]) if early.any() else ())
        seconds = iter(self.second.rows(run, positions[~early] - size) if not early.all() else ())
        return [next(firsts if is_early else seconds) for is_early in early.tolist()]

    def stacked(self, run: Pass, positions: np.ndarray) -> Element:
        # Batches within one part, which is nearly all, keep the fast path of that part.
        size = self.first.cardinality
        if (positions < size).all():
            return self.first.stacked(run, positions)
        if (positions >= size).all():
            return self.second.stacked(run, positions - size)
        return super().stacked(run, positions)


class Zip(IndexedNode, StreamZip):
    """Tuples (or other structures) of one element of each of several data sets."""

    parents: tuple[IndexedNode, ...]

    def rows(self, run: Pass, positions: np.ndarray) -> list[Element]:
        columns = [parent.rows(run, positions) for parent in self.parents]
        # All inputs have as many rows as there are positions, whatever their own sizes.
        return [self.arrange(parts) for parts in zip(*columns, strict=True)]

    def stacked(self, run: Pass, positions: np.ndarray) -> Element:
        return self.arrange([parent.stacked(run, positions) for parent in self.parents])


class Shuffle(IndexedNode, StreamShuffle):
    """The elements in the order of a buffered shuffle, whose buffer holds positions instead of elements."""

    parent: IndexedNode

    def rows(self, run: Pass, positions: np.ndarray) -> list[Element]:
        return self.parent.rows(run, self._shuffled(run, positions))

    def stacked(self, run: Pass, positions: np.ndarray) -> Element:
        return self.parent.stacked(run, self._shuffled(run, positions))

    def _shuffled(self, run: Pass, positions: np.ndarray) -> np.ndarray:
        return run.order(self, self.cardinality, self.buffer_size, self.entropy(run))(positions)


class Batch(IndexedNode, StreamBatch):
    """Batches of `batch_size` elements."""

    parent: IndexedNode

    def rows(self, run: Pass, positions: np.ndarray) -> list[Element]:
        return [self._batch(run, self._members(position)) for position in positions.tolist()]

    def _batch(self, run: Pass, members: np.ndarray) -> Element:
        return self.parent.stacked(run, members)

    def _members(self, position: int) -> np.ndarray:
        stop = (position + 1) * self.batch_size
        # An infinite cardinality is -1, which `min` would take for the end.
        if self.parent.cardinality != INFINITE:
            stop = min(stop, self.parent.cardinality)
        return np.arange(position * self.batch_size, stop)


class PaddedBatch(Batch, StreamPaddedBatch):
    """Batches of `batch_size` elements, padded to one shape."""

    def _batch(self, run: Pass, members: np.ndarray) -> Element:
        return self.make(self.parent.rows(run, members))


class ReadAhead(IndexedNode, StreamReadAhead):
    """The same elements, computed ahead by threads."""

    parent: IndexedNode
    calls: int

    @property
    def ahead(self) -> int:
        return self.count

    @property
    def threads(self) -> int:
        return self.calls

    def rows(self, run: Pass, positions: np.ndarray) -> list[Element]:
        return self.parent.rows(run, positions)

    def stacked(self, run: Pass, positions: np.ndarray) -> Element:
        return self.parent.stacked(run, positions)
