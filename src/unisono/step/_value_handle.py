"""What a variable holds between steps, or before it is made, that is no array on a device of this process.

Tests: tests/virtual/parameter_server/chief/test_remote_array.py,
tests/virtual/strategies/test_sharded_state.py, tests/virtual/strategies/test_first_parts.py.
"""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._errors import ClusterError
from unisono._system._blocks import set_for_block

if TYPE_CHECKING:
    from jax.typing import DTypeLike


#: The seeds that workers can tell each other.
_SEEDS = range(1 << 32)

#: Whether code reads variables in parts, as they are.
_IN_PARTS: ContextVar[bool] = ContextVar("unisono_in_parts", default=False)

#: True where code is traced for the shapes of its results alone.
_FOR_SHAPES: ContextVar[bool] = ContextVar("unisono_for_shapes", default=False)


class ValueHandle(abc.ABC):
    """Stands for a variable's array that lies elsewhere; becomes an array where it is read."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)
        self.nbytes = math.prod(shape) * dtype.itemsize

    @property
    def needs_all(self) -> bool:
        """Whether all workers must read the value together."""
        return False

    @abc.abstractmethod
    def whole(self) -> jax.Array:
        """Return the variable's value as one array."""

    @abc.abstractmethod
    def is_deleted(self) -> bool:
        """Whether a step was given the array."""

    def gather(self) -> None:
        """Bring a value that all workers must read together to the host of each; all of them must call it."""
        if self.needs_all:
            raise NotImplementedError(type(self).__name__)

    @property
    def fill(self) -> float | None:
        """The number that all elements are; None where they differ, or are not known."""
        return None

    def read(self) -> jax.Array:
        """Return the value for code that reads the variable; raise where it may not."""
        return self.whole()

    def assigned(self, value: jax.Array) -> VariableValue:
        """Return what the variable holds after an assignment."""
        return value

    def __jax_array__(self) -> jax.Array:
        return self.whole()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.whole(), dtype)


class AgreedHandle(ValueHandle):
    """Stands for an array that workers do not send each other: they compare a token of it."""

    @property
    @abc.abstractmethod
    def token(self) -> np.ndarray:
        """Two numbers that are the same where the value is."""

    @abc.abstractmethod
    def agreed(self, token: np.ndarray) -> AgreedHandle:
        """Return the value with which all workers begin.

        Args:
            token: of the first worker's value.

        Raises:
            ClusterError: when this one has another value, and cannot make that one.
        """


def different_values() -> ClusterError:
    """Return the error where workers would begin with parts of different values."""
    return ClusterError(
        "All workers must give a variable in parts the same value: each keeps its part of it. Received: "
        "another value than on the first worker. Read the same file on all workers, or assign the same array."
    )


class RowsHandle(ValueHandle):
    """Stands for an array of which single rows can be read and written."""

    @abc.abstractmethod
    def rows(self, begin: int, end: int) -> np.ndarray:
        """Return some rows that follow each other."""

    @abc.abstractmethod
    def take(self, indices: np.ndarray) -> np.ndarray:
        """Return some rows."""

    @abc.abstractmethod
    def write_rows(self, begin: int, value: jax.Array) -> None:
        """Replace some rows that follow each other."""


#: What a variable holds between steps.
VariableValue: TypeAlias = jax.Array | ValueHandle


def whole_value(value: VariableValue) -> jax.Array:
    """Return what a variable holds as one array."""
    return value.whole() if isinstance(value, ValueHandle) else value


def in_parts() -> AbstractContextManager[object]:
    """Read variables as they lie: `variable.value` is `Shards` where they are in parts."""
    return set_for_block(_IN_PARTS, True)


def for_shapes() -> AbstractContextManager[object]:
    """Surround code that is traced for shapes: values that all workers must read together are not read."""
    return set_for_block(_FOR_SHAPES, True)


def as_read(value: VariableValue) -> Any:
    """Return what code gets that reads a variable.

    Args:
        value: what the variable holds, or its scope.

    Raises:
        ContextError: where this process may not read it now.
    """
    if not isinstance(value, ValueHandle) or _IN_PARTS.get():
        return value
    return jnp.zeros(value.shape, value.dtype) if value.needs_all and _FOR_SHAPES.get() else value.read()


class DeferredValue(AgreedHandle):
    """Stands for the first value of a variable, which is made where it is needed.

    Args:
        initializer: of Keras; one that is not repeatable is called once.
        cut: returns the parts of another value that is assigned; None where it stays whole.

    >>> value = DeferredValue(keras.initializers.RandomUniform(seed=1), (2, 3), "float32")
    >>> value.whole().shape, value.is_repeatable, value.fill
    ((2, 3), True, None)
    """

    def __init__(
        self,
        initializer: Callable[..., jax.Array],
        shape: tuple[int, ...],
        dtype: str,
        cut: Callable[[jax.Array], VariableValue] | None = None,
    ) -> None:
        super().__init__(shape, jnp.dtype(dtype))
        self._make, self._cut = initializer, cut

    @property
    def initializer(self) -> Callable[..., jax.Array]:
        """The function that makes the value: Keras' own, or a user's."""
        return self._make

    def lying(self, cut: Callable[[jax.Array], VariableValue]) -> DeferredValue:
        """Return the same first value of a variable that lies in parts."""
        return DeferredValue(self._make, self.shape, self.dtype.name, cut)

    def assigned(self, value: jax.Array) -> VariableValue:
        """Return another value: its parts, where it lies in parts."""
        return value if self._cut is None or isinstance(value, jax.core.Tracer) else self._cut(value)

    def whole(self) -> jax.Array:
        """Return the value, which is made for that."""
        return jnp.asarray(self._make(self.shape, dtype=self.dtype.name))

    def is_deleted(self) -> bool:
        """Return False: no step is given the value."""
        return False

    @property
    def fill(self) -> float | None:
        """The number that all elements are; None where they differ."""
        if isinstance(self._make, (keras.initializers.Zeros, keras.initializers.Ones)):
            return float(isinstance(self._make, keras.initializers.Ones))
        constant = getattr(self._make, "value", None)
        is_constant = isinstance(self._make, keras.initializers.Constant)
        return float(constant) if is_constant and isinstance(constant, (int, float)) else None

    @property
    def is_repeatable(self) -> bool:
        """Whether the initializer is Keras' own, and returns the same at each call."""
        kind, seed = type(self._make), getattr(self._make, "seed", None)
        if not isinstance(self._make, keras.Initializer) or not kind.__module__.startswith("keras."):
            return False
        return seed is None or (type(seed) is int and seed in _SEEDS)

    @property
    def token(self) -> np.ndarray:
        """That it is a first value, and its seed."""
        return np.array([1, getattr(self._make, "seed", None) or 0], np.uint32)

    def agreed(self, token: np.ndarray) -> DeferredValue:
        """Return the first worker's value, which is made from its seed."""
        if np.array_equal(token, self.token):
            return self
        if token[0] != 1:
            raise different_values()
        initializer = copy.copy(self._make)
        initializer.seed = int(token[1])  # type: ignore[attr-defined]
        return DeferredValue(initializer, self.shape, self.dtype.name, self._cut)

    def __deepcopy__(self, memo: dict[int, object]) -> DeferredValue:
        return self
