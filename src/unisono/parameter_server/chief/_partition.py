"""How large variables are cut into shards along their first axis.

Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/partitioners
"""

from __future__ import annotations

import abc
import math
import operator
from collections.abc import Sequence
from typing import Any

import ml_dtypes  # noqa: F401 (NumPy then knows the names of bfloat16 and the float8 types)
import numpy as np

from unisono._checks import whole_number
from unisono._errors import InvalidArgumentError


class Partitioner(abc.ABC):
    """Decide into how many shards a variable is cut.

    A subclass implements `__call__`. Any function of the same arguments is a partitioner as well.

    >>> class Halves(Partitioner):
    ...     def __call__(self, shape, dtype, axis=0):
    ...         return [2] + [1] * (len(shape) - 1)
    """

    @abc.abstractmethod
    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of parts for each axis of a variable; all but that of `axis` are 1.

        Args:
            axis: the axis to cut.
        """


class FixedShardsPartitioner(Partitioner):
    """Cut every variable into the same number of shards, or into single rows where it has fewer.

    Args:
        num_shards: how many shards.

    Raises:
        InvalidArgumentError: `num_shards` is not positive.

    >>> FixedShardsPartitioner(num_shards=2)((10, 3), "float32")
    [2, 1]
    >>> FixedShardsPartitioner(num_shards=16)((10, 3), "float32")
    [10, 1]
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _positive("num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of parts for each axis of a variable; see `Partitioner`."""
        return _parts(shape, axis, self._num_shards)


class MinSizePartitioner(Partitioner):
    """Cut a variable into as many shards as possible, each of at least a given size.

    TensorFlow rounds up and can make shards that are smaller than the minimum; this one never does, unless
    the whole variable is smaller.

    Args:
        min_shard_bytes: the smallest size of a shard, in bytes.
        max_shards: the largest number of shards.
        bytes_per_string: the size of one element of a variable of strings.

    Raises:
        InvalidArgumentError: an argument is not positive.

    >>> MinSizePartitioner(min_shard_bytes=4, max_shards=2)((6, 1), "float32")
    [2, 1]
    >>> MinSizePartitioner(min_shard_bytes=300, max_shards=100)((1000, 10), "float32")
    [100, 1]
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ) -> None:
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of parts for each axis of a variable; see `Partitioner`."""
        row = _bytes_of_row(shape, dtype, axis, self._bytes_per_string)
        # The smallest shard has the rounded-down share of rows, which must reach the minimum.
        rows = math.ceil(self._min_shard_bytes / row) if row else math.inf
        shards = int(shape[axis] // rows) if shape else 1
        return _parts(shape, axis, min(shards, self._max_shards))


class MaxSizePartitioner(Partitioner):
    """Cut a variable into as few shards as possible, each of at most a given size.

    A shard of one row may be larger, and so may all shards where `max_shards` allows no more of them.

    Args:
        max_shard_bytes: the largest size of a shard, in bytes.
        max_shards: the largest number of shards; None for any.
        bytes_per_string: the size of one element of a variable of strings.

    Raises:
        InvalidArgumentError: an argument is not positive.

    >>> MaxSizePartitioner(max_shard_bytes=4)((6, 1), "float32")
    [6, 1]
    >>> MaxSizePartitioner(max_shard_bytes=1024, max_shards=2)((6, 100), "float32")
    [2, 1]
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ) -> None:
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of parts for each axis of a variable; see `Partitioner`."""
        row = _bytes_of_row(shape, dtype, axis, self._bytes_per_string)
        rows = max(1, self._max_shard_bytes // row) if row else math.inf
        shards = math.ceil(shape[axis] / rows) if shape else 1
        return _parts(shape, axis, shards if self._max_shards is None else min(shards, self._max_shards))


def shard_bounds(rows: int, shards: int) -> list[tuple[int, int]]:
    """Return where each shard begins and ends; the first ones have one row more where it does not divide.

    >>> shard_bounds(10, 3)
    [(0, 4), (4, 7), (7, 10)]
    """
    small, larger = divmod(rows, shards)
    ends = [(i + 1) * small + min(i + 1, larger) for i in range(shards)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def shard_count(partitioner: Any, shape: Sequence[int], dtype: Any, path: str = "variable") -> int:
    """Return into how many shards a partitioner, which may be a user's function, cuts the first axis.

    As in TensorFlow, a scalar stays whole, and there are no more shards than rows.

    >>> shard_count(FixedShardsPartitioner(2), (10, 3), "float32")
    2
    >>> shard_count(lambda shape, dtype: [16, 1], (10, 3), "float32")
    10
    >>> shard_count(lambda shape, dtype: [1, 3], (10, 3), "float32", "dense/kernel")
    Traceback (most recent call last):
    ...
    unisono.InvalidArgumentError: A `variable_partitioner` must return a list with the number of parts along
    each axis, which is 1 for all axes but the first. Received: [1, 3] for 'dense/kernel' of shape (10, 3).
    """
    if not len(shape):
        return 1
    answer = partitioner(shape=tuple(shape), dtype=dtype)
    try:
        parts = [operator.index(p) for p in answer]
    except TypeError:
        parts = [0]
    if not parts or parts[0] < 1 or any(p != 1 for p in parts[1:]):
        raise InvalidArgumentError(
            "A `variable_partitioner` must return a list with the number of parts along each axis, which is "
            f"1 for all axes but the first. Received: {answer!r} for {path!r} of shape {tuple(shape)}."
        )
    return max(1, min(parts[0], shape[0]))


def _parts(shape: Sequence[int], axis: int, shards: int) -> list[int]:
    if not shape:
        return []  # a scalar stays whole
    _check_axis(shape, axis)
    return [max(1, min(shards, shape[axis])) if i == axis else 1 for i in range(len(shape))]


def _bytes_of_row(shape: Sequence[int], dtype: Any, axis: int, bytes_per_string: int) -> int:
    """Return the size of a slice of one row along `axis`, in bytes."""
    if not shape:
        return 0
    _check_axis(shape, axis)
    name = getattr(dtype, "name", dtype)
    itemsize = bytes_per_string if name in ("string", str) else np.dtype(name).itemsize
    return math.prod(n for i, n in enumerate(shape) if i != axis) * itemsize


def _check_axis(shape: Sequence[int], axis: int) -> None:
    if not 0 <= axis < len(shape):
        raise InvalidArgumentError(
            f"A variable can be cut along one of its axes. Received: axis={axis} for shape {tuple(shape)}."
        )


def _positive(name: str, value: int) -> int:
    number = whole_number(value, 1)
    if number is None:
        raise InvalidArgumentError(f"Argument `{name}` must be a positive integer. Received: {value!r}.")
    return number
