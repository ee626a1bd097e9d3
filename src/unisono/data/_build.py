"""Add a transformation to a plan: for an indexed input the indexed node, otherwise the one for streams.

Tests: tests/unit/data/test_dataset_transforms.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from unisono._system._object_store import StorePath, given_place
from unisono.data._pipeline import _indexed, _streams
from unisono.data._pipeline._caching import IndexedCache, StreamCache
from unisono.data._pipeline._cardinality import AUTOTUNE, INFINITE
from unisono.data._pipeline._interleave import Unbatch
from unisono.data._pipeline._plan import LONG, IndexedNode, Node, walk
from unisono.data._pipeline._store import FileStore, MemoryStore
from unisono.data._pipeline._structure import Element

#: The most threads of AUTOTUNE. Python functions hold the GIL most of the time, so that more would not help.
_MOST_THREADS = 16
#: Elements that AUTOTUNE reads ahead: enough to level out elements that take longer, few enough for large
#: batches.
_AUTOMATIC_READ_AHEAD = 4


def mapped(
    parent: Node, fn: Callable[[Element], Element], calls: int | None, signature: Element = None
) -> Node:
    """Return a node that maps, in `calls` threads (None for none, AUTOTUNE for one per core).

    Args:
        signature: Spec of the results, None where it is not known; of an indexed input.
    """
    threads = _threads(calls)
    if isinstance(parent, IndexedNode):
        return _indexed.Map(parent, fn, threads, signature)
    return _streams.StreamMap(parent, fn, threads)


def shuffled(parent: Node, buffer_size: int, seed: int, reshuffle: bool, seeded: bool) -> Node:
    """Return a node that shuffles."""
    if isinstance(parent, IndexedNode):
        # A long order keeps only a window of itself, which cannot be read in the order of another shuffle.
        is_long = parent.cardinality == INFINITE or parent.cardinality > LONG
        if not (is_long and any(isinstance(node, _indexed.Shuffle) for node in walk(parent))):
            return _indexed.Shuffle(parent, seed, reshuffle, seeded, buffer_size)
    return _streams.StreamShuffle(parent, seed, reshuffle, seeded, buffer_size)


def repeated(parent: Node, count: int) -> Node:
    """Return a node that repeats, for ever where `count` is negative."""
    if isinstance(parent, IndexedNode):
        # An infinite data set never reaches its second repetition.
        return parent if parent.cardinality == INFINITE and count else _indexed.Repeat(parent, count)
    return _streams.StreamRepeat(parent, count)


def batched(parent: Node, batch_size: int, drop_remainder: bool) -> Node:
    """Return a node that stacks."""
    if isinstance(parent, IndexedNode):
        return _indexed.Batch(parent, batch_size, drop_remainder)
    return _streams.StreamBatch(parent, batch_size, drop_remainder)


def padded(parent: Node, batch_size: int, drop_remainder: bool, shapes: Element, values: Element) -> Node:
    """Return a node that pads and stacks."""
    if isinstance(parent, IndexedNode):
        return _indexed.PaddedBatch(parent, batch_size, drop_remainder, shapes, values)
    return _streams.StreamPaddedBatch(parent, batch_size, drop_remainder, shapes, values)


def unbatched(parent: Node) -> Node:
    """Return a node with the rows of each element."""
    # Each element is the arrays of an indexed source: its rows are slices, without a copy.
    return Unbatch(parent, _indexed.Slices, cycle_length=1, block_length=1, ahead=0)


def taken(parent: Node, count: int) -> Node:
    """Return a node with the first `count` elements, all where it is negative."""
    if count < 0:
        return parent
    if isinstance(parent, IndexedNode):
        return _indexed.Stride(parent, limit=count)
    # Grain's limit must be positive.
    return _streams.Take(parent, count) if count else _streams.StreamRepeat(parent, 0)


def skipped(parent: Node, count: int) -> Node:
    """Return a node without the first `count` elements, without any where it is negative."""
    if count < 0:
        return taken(parent, 0)
    return strided(parent, count, 1)


def strided(parent: Node, start: int, step: int, hinted: bool = False) -> Node:
    """Return a node with the elements at `start, start + step, ...`."""
    if isinstance(parent, IndexedNode):
        return _indexed.Stride(parent, start, step, hinted=hinted)
    return _streams.StreamStride(parent, start, step, hinted)


def concatenated(first: Node, second: Node) -> Node:
    """Return a node with the elements of both."""
    # After an infinite data set nothing has a position.
    if isinstance(first, IndexedNode) and isinstance(second, IndexedNode) and first.cardinality != INFINITE:
        return _indexed.Concatenate(first, second)
    return _streams.StreamConcatenate(first, second)


def zipped(parents: Sequence[Node], arrange: Callable[[Sequence[Element]], Element]) -> Node:
    """Return a node with one element of each side by side."""
    indexed = [parent for parent in parents if isinstance(parent, IndexedNode)]
    if len(indexed) == len(parents):
        return _indexed.Zip(tuple(indexed), arrange)
    return _streams.StreamZip(tuple(parents), arrange)


def cached(parent: Node, filename: str | os.PathLike[str] | StorePath) -> Node:
    """Return a node that keeps the elements, in a file where one is named."""
    store = FileStore(given_place(filename)) if filename else MemoryStore()
    if isinstance(parent, IndexedNode) and parent.cardinality != INFINITE:
        return IndexedCache(parent, store)
    return StreamCache(parent, store)


def read_ahead(parent: Node, count: int | None) -> Node:
    """Return a node that reads ahead, `count` elements (None or AUTOTUNE for a default)."""
    size = _AUTOMATIC_READ_AHEAD if count in (None, AUTOTUNE) else int(count or 0)
    if isinstance(parent, IndexedNode):
        return _indexed.ReadAhead(parent, size, calls=0)
    return _streams.StreamReadAhead(parent, size)


def made_by_threads(parent: Node, calls: int | None) -> Node:
    """Return a node whose elements `calls` threads make (None for none, AUTOTUNE for one per core)."""
    threads = _threads(calls)
    if not threads:
        return parent
    if isinstance(parent, IndexedNode):
        return _indexed.ReadAhead(parent, 0, threads)
    # A stream has one order to be read in: one thread can be ahead.
    return _streams.StreamReadAhead(parent, threads)


def _threads(calls: int | None) -> int:
    return min(os.cpu_count() or 1, _MOST_THREADS) if calls == AUTOTUNE else calls or 0
