"""The order of a buffered shuffle: pure functions of seed and pass, for elements and for positions.

The algorithm of `tf.data.Dataset.shuffle`: a buffer of `buffer_size` items is filled, then each
further item replaces a random one, which is yielded. With a buffer as large as the data it is a Fisher-Yates
shuffle.

Tests: tests/unit/data/test_dataset_shuffle.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")

#: Positions that are computed together: 64 KiB of int64.
_CHUNK = 8192
#: Random numbers that are drawn by one call of NumPy, to spread its overhead.
_PICKS_PER_DRAW = 2048


def shuffled(items: Iterator[T], buffer_size: int, entropy: Sequence[int]) -> Iterator[T]:
    """Yield the items in the order of a buffered shuffle.

    >>> sorted(shuffled(iter(range(10)), 4, [7])) == list(range(10))
    True
    """
    picks = _picks(entropy)
    buffer = list(itertools.islice(items, buffer_size))
    for item in items:
        # Multiply and shift maps 32 bits to a place without a division or a retry. The bias, below
        # len(buffer) / 2**32, is accepted.
        place = next(picks) * len(buffer) >> 32
        yield buffer[place]
        buffer[place] = item
    while buffer:
        place = next(picks) * len(buffer) >> 32
        yield buffer[place]
        buffer[place] = buffer[-1]
        buffer.pop()


def _picks(entropy: Sequence[int]) -> Iterator[int]:
    # NumPy guarantees a bit generator's raw output in all versions, but not a Generator's methods
    # (https://numpy.org/neps/nep-0019-rng-policy.html). A seed must give the same order in every version.
    bits = np.random.PCG64(np.random.SeedSequence(list(entropy)))
    while True:
        yield from (bits.random_raw(_PICKS_PER_DRAW) >> np.uint64(32)).tolist()


class ShuffledOrder:
    """The positions `0, 1, ...` in shuffled order, looked up by vector and computed only as far as needed.

    Args:
        size: Number of positions; None for infinitely many.
        keep: Number of chunks of 8,192 positions to keep; None for all. A dropped chunk is computed again.

    >>> order = ShuffledOrder(10, 4, [7], keep=None)
    >>> sorted(order(np.arange(10)).tolist()) == list(range(10))
    True
    """

    def __init__(self, size: int | None, buffer_size: int, entropy: Sequence[int], keep: int | None) -> None:
        self._size = size
        self._buffer_size = buffer_size
        self._entropy = tuple(entropy)
        self._keep = keep
        # Several reader threads may look up one order.
        self._lock = threading.Lock()
        self._restart()

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the shuffled items at `positions`."""
        numbers = positions // _CHUNK
        result = np.empty_like(positions)
        with self._lock:
            for number in np.unique(numbers).tolist():
                inside = numbers == number
                result[inside] = self._chunk(number)[positions[inside] - number * _CHUNK]
        return result

    def _restart(self) -> None:
        items = itertools.count() if self._size is None else iter(range(self._size))
        self._emitted = shuffled(items, self._buffer_size, self._entropy)
        self._chunks: dict[int, np.ndarray] = {}
        self._next = 0

    def _chunk(self, number: int) -> np.ndarray:
        if number not in self._chunks and number < self._next:
            # The chunk was dropped. The shuffle cannot go backwards: compute it from its start.
            self._restart()
        while self._next <= number:
            self._chunks[self._next] = np.fromiter(itertools.islice(self._emitted, _CHUNK), np.int64)
            self._next += 1
            if self._keep is not None and len(self._chunks) > self._keep:
                del self._chunks[min(self._chunks)]
        return self._chunks[number]
