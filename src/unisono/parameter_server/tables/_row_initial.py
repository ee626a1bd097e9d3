"""First values of large variables, which are not made where a program creates them, but where they will lie.

Keras' initializers are traced. Where the elements of a row follow from the row's number, as those of all its
random initializers do, a server makes its own rows; they have the bits of the whole value.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from unisono.parameter_server.tables._row_program import GatheredRows, RowProgram
from unisono.parameter_server.tables._row_values import NotByRowsError, RowGroup
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
