"""The first value of a variable before it is made, so that it is never whole where it lies in parts.

Tests: tests/virtual/strategies/test_first_parts.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono.step._value_handle import AgreedHandle, VariableValue, different_values

#: The seeds that workers can tell each other.
_SEEDS = range(1 << 32)


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
