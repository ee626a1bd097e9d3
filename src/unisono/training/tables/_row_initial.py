"""First values of large variables, which are not made where a program creates them, but where they will lie.

Keras' initializers are traced. Where the elements of a row follow from the row's number, as those of all its
random initializers do, a server makes its own rows; they have the bits of the whole value.

Tests: tests/virtual/training/tables/test_row_initial.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import current
from unisono._types import KerasWrap
from unisono.step._keras_internals import store_value
from unisono.step._value_handle import ValueHandle
from unisono.training.remote_step.programs._jaxprs import exported
from unisono.training.remote_step.programs._push_layout import PushLayout
from unisono.training.tables._row_program import GatheredRows, RowProgram
from unisono.training.tables._row_values import NotByRowsError, RowGroup

#: A server makes rows of this many bytes at once.
_PIECE = 4 << 20


class DeferredValue(ValueHandle):
    """Stands for the first value of a variable, which is made where it is needed.

    Args:
        initializer: of Keras, which returns the same at each call.
    """

    def __init__(self, initializer: Callable[..., jax.Array], shape: tuple[int, ...], dtype: str) -> None:
        super().__init__(shape, jnp.dtype(dtype))
        self._make = initializer

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

    def rows(self) -> RowInitializer | None:
        """Return what makes rows of the value; None where they can be made together alone."""
        closed = jax.make_jaxpr(self.whole)()
        group = RowGroup(self.shape[0])
        try:
            return RowInitializer(RowProgram(closed, {}, {0: group}, group), self)
        except NotByRowsError:
            return None

    def __deepcopy__(self, memo: dict[int, object]) -> DeferredValue:
        return self


class RowInitializer:
    """Makes rows of a first value."""

    def __init__(self, program: RowProgram, value: DeferredValue) -> None:
        self._program, self._first = program, value

    def program(self, begin: int) -> bytes:
        """Return a program that gets a number and returns some rows from there on, counted from `begin`."""
        shape = self._first.shape
        row = math.prod(shape[1:]) * np.dtype(self._first.dtype).itemsize
        count = min(shape[0], max(1, _PIECE // max(row, 1)))

        def rows(first: jax.Array) -> list[jax.Array]:
            numbers = first + begin + jnp.arange(count, dtype=jnp.int32)
            return self._program.evaluate([], lambda _: GatheredRows(count, count, numbers))

        return exported(rows, [jax.ShapeDtypeStruct((), jnp.int32)])


def wraps() -> list[KerasWrap]:
    """Return what is wrapped of `keras.Variable`."""
    return [(keras.Variable, "_initialize_with_initializer", initialize_later)]


def initialize_later(
    original: Callable[..., None], self: keras.Variable, initializer: Callable[..., jax.Array]
) -> None:
    """Let a large variable begin with `DeferredValue`, where the strategy says so; for Keras' private method.

    Args:
        self: the variable, of which shape and type are known.
    """
    context = current()
    layout = getattr(context.strategy, "state_layout", None) if context is not None else None
    nbytes = math.prod(self.shape) * np.dtype(jnp.dtype(self.dtype)).itemsize
    is_later = isinstance(layout, PushLayout) and layout.makes_later(nbytes)
    if not is_later or not self.shape or not _is_repeatable(initializer):
        original(self, initializer)
        return
    store_value(self, DeferredValue(initializer, tuple(self.shape), str(self.dtype)))


def _is_repeatable(initializer: object) -> bool:
    """Return whether an initializer is Keras' own, and returns the same at each call."""
    is_own = isinstance(initializer, keras.Initializer) and type(initializer).__module__.startswith("keras.")
    return is_own and not isinstance(getattr(initializer, "seed", None), keras.random.SeedGenerator)
