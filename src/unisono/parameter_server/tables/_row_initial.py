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
from unisono.parameter_server.tables._row_program import GatheredRows, RowProgram
from unisono.parameter_server.tables._row_values import NotByRowsError, RowGroup
from unisono.step._keras_internals import store_value, stored_dtype
from unisono.step.variables._deferred_value import DeferredValue
from unisono.training._jaxprs import exported

#: A server makes rows of this many bytes at once.
_PIECE = 4 << 20


def rows_of(value: DeferredValue) -> Callable[[int], bytes] | None:
    """Return what makes programs for rows of a first value; None where they can be made together alone.

    Each gets a number and returns some rows from there on, counted from that with which it was made.
    """
    group = RowGroup(value.shape[0])
    try:
        program = RowProgram(jax.make_jaxpr(value.whole)(), {}, {0: group}, group)
    except NotByRowsError:
        return None
    row = math.prod(value.shape[1:]) * np.dtype(value.dtype).itemsize
    count = min(value.shape[0], max(1, _PIECE // max(row, 1)))

    def program_from(begin: int) -> bytes:
        def rows(first: jax.Array) -> list[jax.Array]:
            numbers = first + begin + jnp.arange(count, dtype=jnp.int32)
            return program.evaluate([], lambda _: GatheredRows(count, count, numbers))

        return exported(rows, [jax.ShapeDtypeStruct((), jnp.int32)])

    return program_from


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
