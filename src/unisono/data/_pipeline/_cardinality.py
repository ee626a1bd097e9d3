"""The number of elements of a data set: exact, infinite or unknown, and its change by each transformation.

The numbers and rules follow `tf.data.Dataset.cardinality`; further special numbers are `tf.data`'s.

Tests: tests/unit/data/test_dataset_transforms.py.
"""

from __future__ import annotations

from collections.abc import Iterable

INFINITE = -1
UNKNOWN = -2

# The names of `tf.data`.
INFINITE_CARDINALITY = INFINITE
UNKNOWN_CARDINALITY = UNKNOWN
# -1 as in tf.data, like INFINITE: each argument accepts only one of them.
AUTOTUNE = -1
SHARD_HINT = -1


def repeated(size: int, count: int) -> int:
    """Return the cardinality of `count` repetitions; a negative `count` repeats without end.

    >>> repeated(3, 2), repeated(3, -1), repeated(0, -1), repeated(UNKNOWN, 0)
    (6, -1, 0, 0)
    """
    if size == 0 or count == 0:
        return 0
    # As in tf.data also where the size is unknown, and may turn out to be 0.
    if count < 0:
        return INFINITE
    # An infinite size stays infinite, and an unknown one unknown.
    return size if size < 0 else size * count


def batched(size: int, batch_size: int, drop_remainder: bool) -> int:
    """Return the number of batches of `batch_size` elements.

    >>> batched(10, 4, False), batched(10, 4, True), batched(INFINITE, 4, True)
    (3, 2, -1)
    """
    if size < 0:
        return size
    return size // batch_size if drop_remainder else -(-size // batch_size)


def taken(size: int, count: int) -> int:
    """Return the cardinality of the first `count` elements; a negative `count` takes all.

    >>> taken(10, 4), taken(INFINITE, 4), taken(UNKNOWN, 4), taken(10, -1)
    (4, 4, -2, 10)
    """
    if count < 0 or count == 0:
        return size if count < 0 else 0
    if size == INFINITE:
        return count
    return size if size == UNKNOWN else min(size, count)


def strided(size: int, start: int, step: int) -> int:
    """Return the number of positions `start, start + step, ...` below `size`.

    >>> strided(10, 1, 4), strided(10, 12, 1), strided(INFINITE, 5, 1)
    (3, 0, -1)
    """
    return size if size < 0 else max(0, -(-(size - start) // step))


def summed(sizes: Iterable[int]) -> int:
    """Return the cardinality of concatenated data sets.

    >>> summed([2, 3]), summed([2, INFINITE]), summed([UNKNOWN, 3])
    (5, -1, -2)
    """
    known = list(sizes)
    if INFINITE in known:
        return INFINITE
    return UNKNOWN if UNKNOWN in known else sum(known)


def shortest(sizes: Iterable[int]) -> int:
    """Return the cardinality of zipped data sets, which end with the shortest.

    >>> shortest([2, 3]), shortest([2, INFINITE]), shortest([UNKNOWN, 3])
    (2, 2, -2)
    """
    known = list(sizes)
    # An unknown data set may be the shortest one, so a finite neighbour does not bound the result.
    if UNKNOWN in known:
        return UNKNOWN
    return min((size for size in known if size != INFINITE), default=INFINITE)
