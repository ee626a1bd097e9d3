"""Largest and smallest values over rows, and arguments plus sums over rows: rules of `_row_analysis`. Pure.

A layer's state is often one of these: the largest value seen so far, or a count of rows.

Tests: tests/unit/training/test_row_analysis.py.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from unisono.training.rows._row_rules import is_total
from unisono.training.rows._row_states import MIXED, AccumulatedSum, Constant, Extreme, RowState, Step

#: Functions of any number that never decrease: the largest number has the largest value. Not
#: roots and logarithms: of a negative number they are NaN, which is the largest of all.
_MONOTONE = frozenset(
    {
        *("cbrt", "ceil", "copy", "copy_p", "erf", "exp", "exp2", "expm1", "floor", "logistic"),
        *("reduce_precision", "round", "sign", "sinh", "stop_gradient", "tanh"),
    }
)

#: Operations that move entries, and combine none.
_MOVES = frozenset(["broadcast_in_dim", "reshape", "rev", "slice", "squeeze", "transpose"])


def of_extremes(step: Step, operands: list[RowState]) -> RowState:
    """Apply to an operation with an operand that is `Extreme` or `AccumulatedSum`."""
    if any(isinstance(s, AccumulatedSum) for s in operands):
        return _of_added(step, operands)
    extremes = {s for s in operands if isinstance(s, Extreme)}
    rest = [s for s in operands if not isinstance(s, Extreme)]
    if len(extremes) > 1 or any(s != Constant() for s in rest) or not step.is_plain:
        return MIXED
    (state,) = extremes
    name, first = step.eqn.primitive.name, isinstance(operands[0], Extreme)
    if name == "convert_element_type":
        return state if _keeps_order(step) else MIXED
    if name in _MONOTONE or name in _MOVES or name == f"reduce_{_words(state)[0]}":
        return state
    if name == "neg" or (name == "sub" and not first):
        return state if isinstance(operands[-1], Constant) else Extreme(not state.is_largest)
    if name in _words(state):
        return state
    # With numbers that are equal for all rows, these never decrease.
    if rest and name in ("max", "min", "and", "or", "add", "sub", "clamp", "select_n"):
        return state if name != "select_n" or isinstance(operands[0], Constant) else MIXED
    if rest and name in ("mul", "div") and (first or name == "mul"):
        return _scaled(state, rest[0])
    return MIXED


def _keeps_order(step: Step) -> bool:
    """Return whether a conversion never decreases: not to truth values, and to types without a sign."""
    before, after = (v.aval.dtype for v in (step.eqn.invars[0], step.eqn.outvars[0]))
    small = (jnp.bool_, jnp.unsignedinteger)
    return before == after or not any(jnp.issubdtype(after, kind) for kind in small)


def _words(state: Extreme) -> tuple[str, str]:
    return ("max", "or") if state.is_largest else ("min", "and")


def _scaled(state: Extreme, factor: RowState) -> RowState:
    """Apply to a product with a number whose sign is known."""
    known = factor.known if isinstance(factor, Constant) else None
    if known is None:
        return MIXED
    if all(np.all(part > 0) for part in known):
        return state
    return Extreme(not state.is_largest) if all(np.all(part < 0) for part in known) else MIXED


def _of_added(step: Step, operands: list[RowState]) -> RowState:
    name, (first, *rest) = step.eqn.primitive.name, operands
    if name == "add" and not isinstance(first, AccumulatedSum):
        first, rest = rest[0], [first]
    if not isinstance(first, AccumulatedSum):
        return MIXED
    return first if name in ("add", "sub") and is_total(rest[0]) else MIXED
