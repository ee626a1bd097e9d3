"""Numbers of steps that are read from the devices, or from workers, only where they are used.

Tests: tests/unit/training/test_group_results.py, tests/virtual/strategies/test_parameter_server_fit.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

#: Arrays, or one array with an entry for each of them.
Arrays: TypeAlias = Sequence[np.ndarray] | np.ndarray | jax.Array


class LazyArray:
    """An array of a step's result, which is waited for where it is read.

    Args:
        read: returns the arrays of all steps of a program, or all arrays of one step.
        index: which of them.

    >>> float(LazyArray(lambda: np.array([1.0, 2.0]), 1))
    2.0
    """

    def __init__(self, read: Callable[[], Arrays], index: int) -> None:
        self._read, self._index = read, index

    @classmethod
    def of_step(cls, every: jax.Array, step: int) -> LazyArray:
        """Return one step's value.

        Args:
            every: values of all steps of a program.
            step: which.
        """
        return cls(lambda: every, step)

    @property
    def value(self) -> jax.Array | np.ndarray:
        """The array alone, on its devices where the others are on devices."""
        return self._read()[self._index]

    def __array__(self, dtype: np.typing.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        every = self._read()
        # One transfer for all steps.
        host = np.asarray(every) if isinstance(every, jax.Array) else every
        return np.asarray(host[self._index], dtype)

    def __float__(self) -> float:
        return float(self.__array__())

    def __format__(self, spec: str) -> str:
        return format(self.__array__()[()], spec)

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's."""
        return self.__array__().shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The array's."""
        return self.__array__().dtype
