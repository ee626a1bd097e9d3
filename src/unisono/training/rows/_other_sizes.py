"""Tells if a function can be computed with a number of rows for which it is not read. Pure.

Tests: tests/virtual/training/test_step_reading.py.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.extend.core as jex

from unisono._types import PyTree
from unisono.training._jaxprs import operations
from unisono.training.rows._row_analysis import traced_for

#: Operations that arrays of one row may do without, or have in addition.
_OF_SHAPES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "copy", "convert_element_type"})


def runs_with(
    rows: int,
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kept: tuple[PyTree, ...] = (),
    like: jex.ClosedJaxpr | None = None,
) -> bool:
    """Return whether a function can be traced for a number of rows.

    Args:
        args: see `row_uses`.
        kept: see `row_states`.
        like: a trace for another number of rows, whose operations it must have. A trace for one row cannot be
            read beside another: an axis of one entry needs no broadcasting, for example.

    >>> import jax
    >>> x = jax.numpy.zeros((2, 3))
    >>> fn = lambda x: jax.numpy.tanh(x - 1.0)
    >>> runs_with(1, fn, (x,), like=jax.make_jaxpr(fn)(x))
    True
    >>> runs_with(1, jax.numpy.squeeze, (x,), like=jax.make_jaxpr(jax.numpy.squeeze)(x))
    False
    """
    try:
        trace = traced_for(rows, fn, args, kept)
    except Exception:  # whatever a user's function raises
        return False
    if like is None:
        return True
    names = [[n for n in operations(program) if n not in _OF_SHAPES] for program in (trace, like)]
    ranks = [[aval.ndim for aval in program.out_avals] for program in (trace, like)]
    return names[0] == names[1] and ranks[0] == ranks[1]
