"""First values of large variables, which are not made where a program creates them, but where they will lie.

Keras' initializers are traced. Where the elements of a row follow from the row's number, as those of all its
random initializers do, a server makes its own rows; they have the bits of the whole value.
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
from unisono.step._keras_internals import store_value, stored_dtype
from unisono.step.variables._deferred_value import DeferredValue
from unisono.training.remote_step.programs._jaxprs import exported
from unisono.training.tables._row_program import GatheredRows, RowProgram
from unisono.training.tables._row_values import NotByRowsError, RowGroup

#: A server makes rows of this many bytes at once.
_PIECE = 4 << 20


def rows_of(value: DeferredValue) -> RowInitializer | None:
    """Return what makes rows of a first value; None where they can be made together alone."""
    closed = jax.make_jaxpr(value.whole)()
    group = RowGroup(value.shape[0])
    try:
        return RowInitializer(RowProgram(closed, {}, {0: group}, group), value)
    except NotByRowsError:
        return None


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
    """Let a variable begin with what its strategy's state layout says; for Keras' private method."""
    context = current()
    replicated = None if context is None else context.strategy.replicated
    value = DeferredValue(initializer, tuple(self.shape), stored_dtype(self))
    held = replicated.state_layout.first(self, value) if replicated is not None and self.shape else None
    if held is None:
        original(self, initializer)
    else:
        store_value(self, held)
