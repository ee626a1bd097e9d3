"""The state of a value of a traced function, one operation in two traces, and numbers of rows. Pure.

Tests: tests/unit/training/test_row_analysis.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

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


#: One operation of a trace, a `jax.extend.core.JaxprEqn`. JAX declares its arguments and results as abstract
#: values, which need not have a shape and a type; in a trace they always have.
Equation: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class Constant:
    """Not of the rows: equal in both traces but for a power of the number of rows.

    Along an axis that counts rows all entries are equal. `known` are both traces' values: small
    arrays, or a scalar that fills an array of any shape. `origin` is the number of the argument that
    the value is, unchanged. `is_own` says that each replica has its own, such as the key of its random
    stream.
    """

    power: int = 0
    known: tuple[np.ndarray, np.ndarray] | None = dataclasses.field(default=None, compare=False)
    origin: int | None = dataclasses.field(default=None, compare=False)
    is_own: bool = dataclasses.field(default=False, compare=False)


@dataclasses.dataclass(frozen=True)
class RowWise:
    """Along `axis`, whose size is a multiple of the rows, entries depend on their own row alone."""

    axis: int
    power: int = 0


@dataclasses.dataclass(frozen=True)
class Reduced:
    """A sum over all rows, times a power of their number."""

    power: int = 0


@dataclasses.dataclass(frozen=True)
class Extreme:
    """The largest, or the smallest, of one value for each row."""

    is_largest: bool


@dataclasses.dataclass(frozen=True)
class AccumulatedSum:
    """The argument `origin`, unchanged, plus a sum over all rows."""

    origin: int


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Anything; `cause` says which operation made it so."""

    cause: str = dataclasses.field(default="", compare=False)


#: The states of operands for most rules, and of all values.
Operand = Constant | RowWise | Reduced | Mixed
RowState = Operand | Extreme | AccumulatedSum
MIXED = Mixed()


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation in both traces.

    Args:
        rows: of the first trace; None where its values have rows of several numbers.
    """

    eqn: Equation
    other: Equation
    ratio: Fraction
    rows: int | None = None

    @property
    def params(self) -> dict[str, Any]:
        """The operation's parameters, in the first trace."""
        return dict(self.eqn.params)

    def same(self, *names: str) -> bool:
        """Return whether these parameters are equal in both traces."""
        return all(self.eqn.params[n] == self.other.params[n] for n in names)

    def shape(self, number: int = 0) -> tuple[int, ...]:
        """The shape of an operand, in the first trace."""
        return tuple(self.eqn.invars[number].aval.shape)

    def out_shape(self, number: int = 0) -> tuple[int, ...]:
        """The shape of a result, in the first trace."""
        return tuple(self.eqn.outvars[number].aval.shape)

    def counting(self, number: int = 0) -> set[int]:
        """The axes of an operand that count rows."""
        return _counting(e.invars[number].aval.shape for e in (self.eqn, self.other))

    def has_each_row(self, before: int, after: int) -> bool:
        """Return whether entries that an axis of a new size counts in the first trace are of one row each.

        An axis that has fewer entries than rows counts groups of rows.
        """
        return after % (self.rows or before) == 0

    def counting_out(self, number: int = 0) -> set[int]:
        """The axes of a result that count rows."""
        return _counting(e.outvars[number].aval.shape for e in (self.eqn, self.other))

    @property
    def is_plain(self) -> bool:
        """True if no operand and no result has an axis that counts rows."""
        mine, theirs = (
            [v.aval.shape for v in (*e.invars, *e.outvars) if hasattr(v.aval, "shape")]
            for e in (self.eqn, self.other)
        )
        return mine == theirs


def _counting(shapes: Iterable[tuple[int, ...]]) -> set[int]:
    return {i for i, (few, many) in enumerate(zip(*shapes, strict=True)) if few != many}


def is_fill(state: RowState) -> bool:
    """Return whether a state means an array filled with one known number."""
    return isinstance(state, Constant) and state.known is not None and np.ndim(state.known[0]) == 0


# --- what holds for many operations ---------------------------------------------------------------


def with_power(state: Operand, power: int) -> Operand:
    """Return a state with another power of the number of rows."""
    return state if isinstance(state, Mixed) else dataclasses.replace(state, power=power)


def is_zero(state: RowState) -> bool:
    """Return whether a value is zero everywhere, and so has any power of the number of rows."""
    return isinstance(state, Constant) and state.known is not None and not any(map(np.any, state.known))


def aligned(operands: Sequence[RowState]) -> Operand:
    """Return the state of entries that are functions of the operands' entries at the same place."""
    if not all(isinstance(s, (Constant, RowWise)) for s in operands):
        return MIXED
    apart = {s.axis for s in operands if isinstance(s, RowWise)}
    powers = {s.power for s in operands if isinstance(s, (Constant, RowWise)) and not is_zero(s)}
    if len(apart) > 1 or len(powers) > 1:
        return MIXED
    power = powers.pop() if powers else 0
    return RowWise(apart.pop(), power) if apart else Constant(power)


def anything(step: Step, operands: Sequence[RowState]) -> Operand:
    """Apply to an operation without a rule: certain only where no operand has to do with rows."""
    plain = all(s == Constant() for s in operands) and step.is_plain
    return Constant() if plain and equal_params(step.eqn.params, step.other.params) else MIXED


def equal_params(few: Mapping[str, object], many: Mapping[str, object]) -> bool:
    """Return whether the parameters of an operation are equal in both traces."""
    # Parameters hold anything: arrays, for which `==` has no truth value, and programs, which are themselves
    # alone equal. The texts of two programs are equal where their operations are.
    if few.keys() != many.keys():
        return False
    try:
        return all(bool(few[n] == many[n]) or _same_programs(few[n], many[n]) for n in few)
    except (TypeError, ValueError):
        return False


def _same_programs(few: object, many: object) -> bool:
    parts = [jax.tree.leaves(x, is_leaf=_is_program) for x in (few, many)]
    return all(_is_program(x) for part in parts for x in part) and str(parts[0]) == str(parts[1])


def _is_program(x: object) -> bool:
    # The arrays that a program holds are not in its text.
    return isinstance(x, jex.Jaxpr) or (isinstance(x, jex.ClosedJaxpr) and not x.consts)


def is_total(state: RowState) -> bool:
    """Return whether a value is a sum over rows, or counts them."""
    return state == Reduced(0) or (isinstance(state, Constant) and state.power == 1)
