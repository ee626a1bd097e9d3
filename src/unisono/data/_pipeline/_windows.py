"""Regroup elements: windows, groups with a common key, and batches of other sizes.

Tests: tests/unit/data/test_dataset_further.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono.data._pipeline import _cardinality, _structure
from unisono.data._pipeline._cardinality import INFINITE, UNKNOWN
from unisono.data._pipeline._indexed import ElementList
from unisono.data._pipeline._padding import at, with_sizes
from unisono.data._pipeline._plan import (
    CountingNode,
    IndexedNode,
    Node,
    Pass,
    SelectiveNode,
    StateIterator,
    UnaryNode,
    first_spec,
)
from unisono.data._pipeline._streams import ReplayIterator
from unisono.data._pipeline._structure import Element, TensorSpec


class _WindowNode(UnaryNode):
    """Windows of successive elements, each component a data set of its own."""

    wrap: Callable[[Node], Any]
    size: int
    shift: int
    stride: int
    drop_remainder: bool

    @functools.cached_property
    def cardinality(self) -> int:
        size = self.parent.cardinality
        if size < 0:
            return size
        if self.drop_remainder:
            # A full window needs its last member, which lies this far behind its start.
            size = max(0, size - (self.size - 1) * self.stride)
        return _cardinality.strided(size, 0, self.shift)

    @functools.cached_property
    def spec(self) -> Element:
        return _structure.map_leaves(_structure.DatasetSpec, self.parent.spec)

    def made(self, elements: Sequence[Element]) -> Element:
        """Return a window of elements."""
        return _structure.combine(lambda parts, path: self._component(list(parts)), elements)

    def _component(self, parts: list[Any]) -> Any:
        # The elements are held as they are, not stacked: they may differ in shape.
        return self.wrap(ElementList(parts))


class Windows(_WindowNode, IndexedNode):
    """Windows over an indexed node."""

    parent: IndexedNode

    def rows(self, run: Pass, positions: np.ndarray) -> list[Element]:
        return [self.made(self.parent.rows(run, self._members(p))) for p in positions.tolist()]

    def _members(self, position: int) -> np.ndarray:
        first = position * self.shift
        stop = first + self.size * self.stride
        if self.parent.cardinality != INFINITE:
            stop = min(stop, self.parent.cardinality)
        return np.arange(first, stop, self.stride)


class StreamWindows(_WindowNode):
    """Windows over a stream."""

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        return _WindowIterator(self, self.parent.iterate(run))


class _WindowIterator(StateIterator):
    """Buffers the elements of a window; its state is the source's before the first of them."""

    def __init__(self, node: StreamWindows, parent: grain.DatasetIterator) -> None:
        super().__init__(parent)
        self._node = node
        self._source = parent
        #: Elements from the start of the next window on, each with the state before it.
        self._held: list[tuple[dict[str, Any], Element]] = []
        self._to_skip = 0

    def __next__(self) -> Element:
        node = self._node
        span = (node.size - 1) * node.stride + 1
        # Skipped now instead of after the previous window: the state must not depend on elements not yet
        # needed.
        while len(self._held) < span + self._to_skip and self._read():
            continue
        del self._held[: self._to_skip]
        self._to_skip = 0
        members = [element for _, element in self._held[: span : node.stride]]
        if not members or (node.drop_remainder and len(members) < node.size):
            raise StopIteration
        self._to_skip = node.shift
        return node.made(members)

    def _read(self) -> bool:
        before = self._source.get_state()
        try:
            self._held.append((before, next(self._source)))
        except StopIteration:
            return False
        return True

    def get_state(self) -> dict[str, Any]:
        start = self._held[0][0] if self._held else self._source.get_state()
        return {"start": start, "to_skip": self._to_skip}

    def set_state(self, state: dict[str, Any]) -> None:
        self._held = []
        self._source.set_state(state["start"])
        self._to_skip = state["to_skip"]


class Groups(CountingNode, SelectiveNode):
    """Groups of elements with equal keys, each mapped by a function to a data set.

    Args:
        known_spec: Returns the spec of the results; None takes the first one's.
    """

    key_of: Callable[[Element], int]
    reduce: Callable[[int, list[Element]], Node]
    size_of: Callable[[int], int]
    known_spec: Callable[[], Element] | None = None

    @functools.cached_property
    def spec(self) -> Element:
        return (
            _structure.map_leaves(_any_size, first_spec(self)) if not self.known_spec else self.known_spec()
        )

    @property
    def varies(self) -> bool:
        # The data sets that the function returns may be shuffled.
        return True

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        inside = run.at(run.draws.get(self, 0))
        # Incomplete groups may hold any number of elements: a restored iterator fills them again.
        return ReplayIterator(self.parent.iterate(run), lambda source: self._joined(source, inside))

    def _joined(self, source: Iterator[Element], run: Pass) -> Iterator[Element]:
        groups: dict[int, list[Element]] = {}
        sizes: dict[int, int] = {}
        numbers = itertools.count()
        for element in source:
            key = self.key_of(element)
            group = groups.setdefault(key, [])
            group.append(element)
            if len(group) == 1:
                sizes[key] = self.size_of(key)
            if len(group) == sizes[key]:
                yield from self._made(key, groups.pop(key), run.at(next(numbers)))
        # The remaining groups in the order of their keys, as in tf.data.
        for key in sorted(groups):
            yield from self._made(key, groups[key], run.at(next(numbers)))

    def _made(self, key: int, elements: list[Element], run: Pass) -> Iterator[Element]:
        # The data set was created just now and has no numbers of passes: the path alone decides its shuffles.
        iterator = self.reduce(key, elements).iterate(Pass({}, run.path))
        try:
            yield from iterator
        finally:
            iterator.close()


def _any_size(spec: TensorSpec) -> TensorSpec:
    # The results for other groups may differ from the first one in every dimension.
    return TensorSpec([None] * len(spec.shape or ()), spec.dtype)


class Rebatch(UnaryNode):
    """The rows of batches, in batches of other sizes."""

    sizes: tuple[int, ...]
    drop_remainder: bool

    @property
    def cardinality(self) -> int:
        return self.parent.cardinality if self.parent.cardinality in (0, INFINITE) else UNKNOWN

    @functools.cached_property
    def spec(self) -> Element:
        same = self.drop_remainder and len(set(self.sizes)) == 1
        return _structure.batched_spec(
            _structure.unbatched_spec(self.parent.spec), self.sizes[0] if same else None
        )

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        return _RebatchIterator(self, self.parent.iterate(run))


class _RebatchIterator(StateIterator):
    """Its state is the source's before the current batch, and the number of its rows in use."""

    def __init__(self, node: Rebatch, parent: grain.DatasetIterator) -> None:
        super().__init__(parent)
        self._node = node
        self._source = parent
        self._turn = 0
        self._used = 0
        self._before: dict[str, Any] | None = None
        self._batch: Element = None

    def __next__(self) -> Element:
        wanted = self._node.sizes[self._turn % len(self._node.sizes)]
        parts: list[Element] = []
        while wanted and self._has_rows():
            stop = min(_structure.leading_size(self._batch), self._used + wanted)
            parts.append(self._rows(self._used, stop))
            wanted -= stop - self._used
            self._used = stop
        if not parts or (wanted and self._node.drop_remainder):
            raise StopIteration
        self._turn += 1
        return _structure.concatenated(parts)

    def _rows(self, start: int, stop: int) -> Element:
        return _structure.map_leaves(lambda array: array[start:stop], self._batch)

    def _has_rows(self) -> bool:
        # A loop, because a batch may have no rows.
        while self._before is None or self._used >= _structure.leading_size(self._batch):
            before = self._source.get_state()
            try:
                self._batch = next(self._source)
            except StopIteration:
                return False
            # Only once a batch was read: at the end the state stays at the last batch.
            self._before, self._used = before, 0
        return True

    def get_state(self) -> dict[str, Any]:
        if self._before is None:
            return {"before": self._source.get_state(), "used": 0, "turn": self._turn, "in_use": False}
        return {"before": self._before, "used": self._used, "turn": self._turn, "in_use": True}

    def set_state(self, state: dict[str, Any]) -> None:
        self._source.set_state(state["before"])
        self._before, self._turn = None, state["turn"]
        # The state does not hold the rows of the batch in use: the source returns it again.
        if state["in_use"]:
            self._has_rows()
            self._used = state["used"]


def bucket_of(length: int, boundaries: Sequence[int]) -> int:
    """Return the number of the bucket for elements of a length.

    >>> [bucket_of(n, [3, 5]) for n in (2, 3, 4, 5)]
    [0, 1, 1, 2]
    """
    # As in tf.data, an element as long as a boundary belongs to the next bucket.
    return int(np.searchsorted(np.asarray(boundaries), length, side="right"))


def padded_to(spec: Element, shapes: Element, size: int) -> Element:
    """Return padded shapes in which every dimension that varies has the same size."""
    if shapes is None and not any(None in (leaf.shape or ()) for _, leaf in _structure.leaves(spec)):
        raise InvalidArgumentError(
            "With pad_to_bucket_boundary=True, elements must have a dimension whose size varies. "
            f"Received: elements of {spec!r:.200}. Write padded_shapes=[None], or give the source a "
            "signature with None for such a dimension."
        )
    return _structure.combine(
        lambda leaves, path: with_sizes(leaves[0].shape if shapes is None else at(shapes, path), size), [spec]
    )


def check_buckets(boundaries: Sequence[int], sizes: Sequence[int]) -> None:
    """Check the arguments of `bucket_by_sequence_length`."""
    if list(boundaries) != sorted(set(boundaries)) or len(sizes) != len(boundaries) + 1:
        raise InvalidArgumentError(
            "bucket_boundaries must increase, and bucket_batch_sizes have one more number. "
            f"Received: bucket_boundaries={list(boundaries)}, bucket_batch_sizes={list(sizes)}. "
            "Write bucket_by_sequence_length(len_fn, [16, 32], [64, 32, 16])."
        )
