"""Tells if a function can be computed with a number of rows for which it is not read. Pure.

Tests: tests/virtual/training/test_step_reading.py.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.extend.core as jex

from unisono._types import PyTree
from unisono.training._jaxprs import equations
from unisono.training.rows._row_analysis import traced_for

#: Operations that arrays of one row may do without, or have in addition. The derivative of a broadcast is
#: a sum.
_OF_SHAPES = frozenset(
    {"broadcast_in_dim", "reshape", "squeeze", "copy", "convert_element_type", "reduce_sum"}
)


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
        kept: see `traced_states`.
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
    return _form(trace) == _form(like)


def _form(program: jex.ClosedJaxpr) -> list[tuple[str, list[int]]]:
    """Return the operations of a program, and the ranks of what they and the program return."""
    found = [
        (eqn.primitive.name, [getattr(v.aval, "ndim", 0) for v in eqn.outvars])
        for eqn in equations(program)
        if eqn.primitive.name not in _OF_SHAPES
    ]
    return [*found, ("", [aval.ndim for aval in program.out_avals])]
