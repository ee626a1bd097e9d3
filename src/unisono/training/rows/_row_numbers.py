"""Numbers of a traced function that are known: shapes, and factors such as `1 / rows`. Pure.

Tests: tests/unit/training/test_row_analysis.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from unisono.training.rows._row_states import Constant, Equation, RowState, Step

#: Up to this many numbers, an array's values are computed too: shapes and factors such as `1 / rows` are
#: smaller, and data larger.
SMALL = 16

_REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {"reduce_sum": np.sum, "reduce_prod": np.prod}

#: Operations on small numbers, as NumPy computes them.
_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "square": np.square,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "copy": np.asarray,
    "stop_gradient": np.asarray,
}


def computed(step: Step, operands: list[RowState]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return both traces' values of a result, where all operands' are known; else None."""
    pairs = [s.known for s in operands if isinstance(s, Constant) and s.known is not None]
    if len(pairs) != len(operands) or not pairs:
        return None
    name = step.eqn.primitive.name
    with np.errstate(all="ignore"):
        few, many = (_compute(name, e, [p[i] for p in pairs]) for i, e in enumerate((step.eqn, step.other)))
    return None if few is None or many is None else (few, many)


def _compute(name: str, eqn: Equation, values: list[np.ndarray]) -> np.ndarray | None:
    aval = eqn.outvars[0].aval
    fills = all(np.ndim(v) == 0 for v in values)
    if aval.size > SMALL and not fills:
        return None
    if name in _ARITHMETIC:
        result = _ARITHMETIC[name](*values)
    elif name == "div" and jnp.issubdtype(aval.dtype, jnp.inexact):
        result = values[0] / values[1]
    elif name in ("convert_element_type", "broadcast_in_dim", "reshape", "squeeze") and fills:
        result = values[0]
    elif name in _REDUCTIONS:
        result = _reduced(name, eqn, values[0])
    else:
        return None
    return np.asarray(result).astype(aval.dtype)


def _reduced(name: str, eqn: Equation, value: np.ndarray) -> np.ndarray:
    axes = tuple(eqn.params["axes"])
    if np.ndim(value):
        return _REDUCTIONS[name](value, axis=axes)
    count = math.prod(eqn.invars[0].aval.shape[i] for i in axes)
    return np.asarray(value * count if name == "reduce_sum" else value**count)


def chosen(step: Step, operands: list[RowState]) -> int | None:
    """Return the place of the operand that a choice takes, where the condition is known."""
    condition = operands[0] if step.eqn.primitive.name == "select_n" else None
    if not isinstance(condition, Constant) or condition.known is None:
        return None
    taken = {int(x) for part in condition.known for x in np.ravel(part)}
    return 1 + taken.pop() if len(taken) == 1 else None
