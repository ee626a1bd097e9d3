"""Sources and transformations that yield their elements in sequence.

Grain's iterators are used for the transformations that it has; the others are here. The state of each is
exact: a restored iterator continues with the next element, and reads its input again where that is necessary.

Tests: tests/unit/data/test_dataset_transforms.py, tests/unit/data/test_dataset_state.py.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any

import grain

from unisono.data._pipeline import _cardinality, _order, _padding, _structure
from unisono.data._pipeline._cardinality import UNKNOWN
from unisono.data._pipeline._plan import (
    Node,
    Pass,
    SeededNode,
    SelectiveNode,
    SourceIterator,
    StateIterator,
    Stream,
    UnaryNode,
    first_spec,
)
from unisono.data._pipeline._structure import Element


class Generator(Node):
    """The elements of the iterables that a function returns, one for each pass."""

    make: Callable[[], Iterable[Element]]
    signature: Element = None

    @property
    def cardinality(self) -> int:
        return UNKNOWN

    @functools.cached_property
    def spec(self) -> Element:
        return first_spec(self) if self.signature is None else self.signature

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        return _GeneratorIterator(self.make)


class _GeneratorIterator(StateIterator):
    def __init__(self, make: Callable[[], Iterable[Element]]) -> None:
        super().__init__()
        self._make = make
        self._count = 0
        self._elements: Iterator[Element] | None = None
        self._failed: list[Exception] = []

    def __next__(self) -> Element:
        if self._elements is None:
            # A generator cannot be rewound: a restored one runs again up to its position.
            self._elements = itertools.islice(self._make(), self._count, None)
        element = _next_of(self._elements, self._failed)
        self._count += 1
        return element

    def get_state(self) -> dict[str, Any]:
        return {"count": self._count}

    def set_state(self, state: dict[str, Any]) -> None:
        self._count = state["count"]
        self._elements = None
        self._failed.clear()


def _next_of(elements: Iterator[Element], failed: list[Exception]) -> Element:
    """Return the next element of a generator; raise the error that ended it at every further call.

    After an error Python's generators only raise StopIteration, which would look like the end of the data.
    """
    if failed:
        raise failed[0]
    try:
        return next(elements)
    except StopIteration:
        raise
    except Exception as error:
        failed.append(error)
        raise


class StreamMap(UnaryNode):
    """A function applied to each element, in threads if `calls` is above 1."""

    fn: Callable[[Element], Element]
    calls: int = 0

    @functools.cached_property
    def spec(self) -> Element:
        return first_spec(self)

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        if self.calls > 1:
            return _ParallelMapIterator(self.parent.iterate(run), self.fn, self.calls)
        return iter(Stream(self.parent, run).map(self.fn))


class _ParallelMapIterator(StateIterator):
    """Maps in threads and yields in order. Grain maps a stream in one thread only."""

    def __init__(self, parent: grain.DatasetIterator, fn: Callable[[Element], Element], calls: int) -> None:
        super().__init__(parent)
        self._source = parent
        self._fn = fn
        self._calls = calls
        self._pool: futures.ThreadPoolExecutor | None = None
        # Each call in flight, with the source's state before its element.
        self._flying: deque[tuple[dict[str, Any], futures.Future[Element]]] = deque()

    def __next__(self) -> Element:
        # With the first element: an iterator that is only restored or inspected starts no threads.
        if self._pool is None:
            self._pool = futures.ThreadPoolExecutor(self._calls, thread_name_prefix="unisono-map")
        # No more elements than there are threads: others would only be read again after a restore.
        while len(self._flying) < self._calls:
            state = self._source.get_state()
            try:
                element = next(self._source)
            except StopIteration:
                break
            self._flying.append((state, self._pool.submit(self._fn, element)))
        if not self._flying:
            raise StopIteration
        # Removed before `result` raises, so that the next call continues after an element that failed.
        return self._flying.popleft()[1].result()

    def get_state(self) -> dict[str, Any]:
        return {"parent": self._flying[0][0] if self._flying else self._source.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        # Results of calls in flight are dropped: their elements are read again after the state.
        self._flying.clear()
        self._source.set_state(state["parent"])

    def close(self) -> None:
        super().close()
        if self._pool is not None:
            # Without waiting for calls in progress, which are the user's and may take any time.
            self._pool.shutdown(wait=False, cancel_futures=True)


class Filter(SelectiveNode):
    """The elements for which a predicate holds."""

    predicate: Callable[[Element], bool]

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        return iter(Stream(self.parent, run).filter(self.predicate))


class StreamBatch(UnaryNode):
    """Batches of `batch_size` elements."""

    batch_size: int
    drop_remainder: bool

    @functools.cached_property
    def cardinality(self) -> int:
        return _cardinality.batched(self.parent.cardinality, self.batch_size, self.drop_remainder)

    @functools.cached_property
    def spec(self) -> Element:
        return _structure.batched_spec(self.parent.spec, self.batch_size if self.drop_remainder else None)

    def make(self, elements: Sequence[Element]) -> Element:
        """Return a batch of elements."""
        return _structure.stack(elements)

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        stream = Stream(self.parent, run)
        return iter(stream.batch(self.batch_size, drop_remainder=self.drop_remainder, batch_fn=self.make))


class StreamPaddedBatch(StreamBatch):
    """Batches of `batch_size` elements, padded to one shape."""

    shapes: Element
    values: Element

    @functools.cached_property
    def spec(self) -> Element:
        size = self.batch_size if self.drop_remainder else None
        return _padding.padded_spec(self.parent.spec, size, self.shapes)

    def make(self, elements: Sequence[Element]) -> Element:
        return _padding.pad(elements, self.shapes, self.values)


class Take(UnaryNode):
    """The first `count` elements, at least one."""

    count: int

    @functools.cached_property
    def cardinality(self) -> int:
        return _cardinality.taken(self.parent.cardinality, self.count)

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        # Grain rejects a limit of 0: `_build.taken` never passes one.
        return iter(grain.experimental.LimitIterDataset(Stream(self.parent, run), self.count))


class StreamStride(UnaryNode, label="StreamStrided"):
    """The elements at `start, start + step, ...`.

    Args:
        hinted: whether the distribution policy HINT replaces start and step by its worker's.
    """

    start: int = 0
    step: int = 1
    hinted: bool = False

    @functools.cached_property
    def cardinality(self) -> int:
        return _cardinality.strided(self.parent.cardinality, self.start, self.step)

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        return _StrideIterator(self.parent.iterate(run), self.start, self.step)


class _StrideIterator(SourceIterator):
    kept = ("index",)

    def __init__(self, source: grain.DatasetIterator, start: int, step: int) -> None:
        super().__init__(source)
        self._start = start
        self._step = step
        self._index = 0

    def __next__(self) -> Element:
        while True:
            element = next(self._source)
            since_start = self._index - self._start
            self._index += 1
            if since_start >= 0 and since_start % self._step == 0:
                return element


class StreamShuffle(SeededNode, UnaryNode):
    """The elements in the order of a buffered shuffle."""

    buffer_size: int

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        # Not Grain's shuffle of streams, which permutes one window after another: tf.data's buffer slides.
        # The same numbers as in `Shuffle`: an order does not depend on whether the input is indexed.
        entropy = self.entropy(run)
        return ReplayIterator(
            self.parent.iterate(run), lambda source: _order.shuffled(source, self.buffer_size, entropy)
        )


class ReplayIterator(StateIterator):
    """The elements of a generator function over an iterator, which may buffer any of the iterator's elements.

    The state is small: it holds no elements. When it is restored, the iterator is read again from its start.

    Args:
        make: Returns the generator over the input; it must be deterministic.
    """

    def __init__(
        self, parent: grain.DatasetIterator, make: Callable[[Iterator[Element]], Iterator[Element]]
    ) -> None:
        super().__init__(parent)
        self._source = parent
        self._make = make
        # Before the generator reads anything: it may read many elements ahead of those that it yields.
        self._begin = parent.get_state()
        self._restart()

    def _restart(self) -> None:
        self._emitted = 0
        self._failed: list[Exception] = []
        self._elements = self._make(self._source)

    def __next__(self) -> Element:
        element = _next_of(self._elements, self._failed)
        self._emitted += 1
        return element

    def get_state(self) -> dict[str, Any]:
        return {"begin": self._begin, "emitted": self._emitted}

    def set_state(self, state: dict[str, Any]) -> None:
        self._begin = state["begin"]
        self._source.set_state(self._begin)
        self._restart()
        # The elements are computed again, so that the buffer of the generator holds what it held.
        for _ in range(state["emitted"]):
            next(self)


class StreamRepeat(UnaryNode):
    """All elements `count` times, without end if it is negative; shuffles before it change each time."""

    count: int

    @functools.cached_property
    def cardinality(self) -> int:
        return _cardinality.repeated(self.parent.cardinality, self.count)

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        return _SequenceIterator(lambda part: self._part(run, part), endless=self.count < 0)

    def _part(self, run: Pass, part: int) -> grain.DatasetIterator | None:
        # Each repetition has its own number in the path, so a shuffle below has its own order in each.
        return None if 0 <= self.count <= part else self.parent.iterate(run.at(part))


class StreamConcatenate(Node):
    """The elements of one data set, then another's."""

    first: Node
    second: Node

    @functools.cached_property
    def cardinality(self) -> int:
        return _cardinality.summed([self.first.cardinality, self.second.cardinality])

    @property
    def spec(self) -> Element:
        return self.first.spec

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        parts = (self.first, self.second)
        return _SequenceIterator(lambda part: parts[part].iterate(run) if part < 2 else None, endless=False)


class _SequenceIterator(StateIterator):
    """Yields the elements of several iterators in sequence.

    Args:
        make: Returns the iterator with a number, or None after the last.
        endless: Whether there is no last one. Then an empty iterator ends the sequence: it would never end
            otherwise.
    """

    def __init__(self, make: Callable[[int], grain.DatasetIterator | None], endless: bool) -> None:
        super().__init__()
        self._make = make
        self._endless = endless
        self._enter(0)

    def _enter(self, part: int) -> None:
        self._part = part
        self._is_empty = True
        self._current = self._make(part)

    def __next__(self) -> Element:
        while self._current is not None:
            try:
                element = next(self._current)
            except StopIteration:
                # The input is empty, and would be in every repetition.
                if self._endless and self._is_empty:
                    raise
                self._current.close()
                self._enter(self._part + 1)
            else:
                self._is_empty = False
                return element
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        current = None if self._current is None else self._current.get_state()
        return {"part": self._part, "is_empty": self._is_empty, "current": current}

    def set_state(self, state: dict[str, Any]) -> None:
        self.close_current()
        self._enter(state["part"])
        self._is_empty = state["is_empty"]
        if self._current is not None:
            self._current.set_state(state["current"])

    def close_current(self) -> None:
        """Close the current iterator."""
        if self._current is not None:
            self._current.close()

    def close(self) -> None:
        super().close()
        self.close_current()


class StreamZip(Node):
    """Tuples (or other structures) of one element of each of several data sets."""

    parents: tuple[Node, ...]
    arrange: Callable[[Sequence[Element]], Element]

    @functools.cached_property
    def cardinality(self) -> int:
        return _cardinality.shortest(parent.cardinality for parent in self.parents)

    @functools.cached_property
    def spec(self) -> Element:
        return self.arrange([parent.spec for parent in self.parents])

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        streams = [Stream(parent, run) for parent in self.parents]
        # `strict=False`: as in tf.data the shortest input ends the sequence, and Grain would raise.
        return iter(grain.experimental.ZipIterDataset(streams, strict=False).map(self.arrange))


class StreamReadAhead(UnaryNode):
    """The same elements, read ahead by a thread."""

    count: int

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        stream = Stream(self.parent, run)
        return iter(grain.experimental.ThreadPrefetchIterDataset(stream, prefetch_buffer_size=self.count))
