"""What a traced function does with the rows of a batch: apart, added up, or mixed. Pure.

A function is traced twice, for a replica's number of rows and for that of all replicas. Both
traces are read side by side, one operation after the other. An axis whose size differs in them
counts rows, and a number that differs was computed from the number of rows. For every value the
reading keeps what is certain: it does not depend on the rows, it has an entry for each row that
depends on this row alone, or it is a sum over all rows. What is not certain is mixed.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from unisono._types import ArrayLike, PyTree
from unisono.training._jaxprs import called_by
from unisono.training.replica._row_rules import RULES, anything
from unisono.training.replica._row_states import (
    MIXED,
    Constant,
    Equation,
    Mixed,
    Reduced,
    RowState,
    RowWise,
    Step,
    is_fill,
)

#: An argument or result of an operation in a trace.
Atom = jex.Var | jex.Literal


class RowUse(enum.Enum):
    """What a result of a function is, as far as rows are concerned."""

    NONE = "the same for any rows"
    APART = "one entry for each row along the first axis, which depends on this row alone"
    SUM = "a sum over the rows"
    MEAN = "a mean over the rows, up to a constant"
    MIXED = "not known: the value of one row may depend on others"


def row_uses(fn: Callable[..., PyTree], args: tuple[PyTree, ...], few: int, many: int) -> list[RowUse]:
    """Return what each result of a function does with rows, in the order of `jax.tree.leaves`.

    Args:
        fn: from `*args` to a pytree of arrays; traced, never computed.
        args: pytrees of arrays, or of what has their shape and type, whose first axes count rows.
            Scalars are the same for any rows.
        few: the number of rows to trace first, at least 1.
        many: another, larger number of rows.

    >>> x = np.zeros((4, 3), "f4")
    >>> uses = row_uses(lambda x: (x.sum(axis=1), x.mean(), x.max()), (x,), 2, 4)
    >>> [use.name for use in uses]
    ['APART', 'MEAN', 'MIXED']
    """
    leaves, structure = jax.tree.flatten(args)

    def traced(rows: int) -> jex.ClosedJaxpr:
        shapes = [
            jax.ShapeDtypeStruct(
                (rows, *x.shape[1:]) if x.ndim else (), jax.dtypes.canonicalize_dtype(x.dtype)
            )
            for x in leaves
        ]
        return jax.make_jaxpr(lambda *flat: jax.tree.leaves(fn(*jax.tree.unflatten(structure, flat))))(
            *shapes
        )

    pair = traced(few), traced(many)
    uses = uses_in_traces(*pair, Fraction(many, few), [bool(x.ndim) for x in leaves])
    return uses + [RowUse.MIXED] * (len(pair[1].jaxpr.outvars) - len(uses))


def uses_in_traces(
    few: jex.ClosedJaxpr, many: jex.ClosedJaxpr, ratio: Fraction, counts_rows: Sequence[bool]
) -> list[RowUse]:
    """Return what each result of a program does with rows; see `row_uses`.

    Args:
        counts_rows: for each argument, whether its first axis counts rows.
    """
    start: list[RowState] = [RowWise(0) if counts else Constant() for counts in counts_rows]
    states = _TraceReader(ratio).closed(few, many, start)
    if states is None:
        return [RowUse.MIXED] * len(few.jaxpr.outvars)
    return [_use_of(s) for s in states]


class _TraceReader:
    """Reads two traces of a function whose rows stand in the ratio `ratio`."""

    def __init__(self, ratio: Fraction) -> None:
        self._ratio = ratio

    def closed(
        self, few: jex.ClosedJaxpr, many: jex.ClosedJaxpr, inputs: Sequence[RowState]
    ) -> list[RowState] | None:
        """Return the states of the results; None where the traces differ in their operations."""
        if len(few.consts) != len(many.consts):
            return None
        constants = [self._constant(a, b) for a, b in zip(few.consts, many.consts, strict=True)]
        variables = [*few.jaxpr.constvars, *few.jaxpr.invars]
        known: dict[jex.Var, RowState] = dict(zip(variables, [*constants, *inputs], strict=True))
        results = few.jaxpr.outvars, many.jaxpr.outvars
        if len(few.eqns) != len(many.eqns) or len(results[0]) != len(results[1]):
            return None
        for eqn, other in zip(few.eqns, many.eqns, strict=True):
            if eqn.primitive.name != other.primitive.name or len(eqn.invars) != len(other.invars):
                return None
            found = self._results(Step(eqn, other, self._ratio), self._operands(known, eqn, other))
            for variable, state in zip(eqn.outvars, found, strict=True):
                known[variable] = state
        return [self._operand(known, a, b) for a, b in zip(*results, strict=True)]

    def _operands(self, known: Mapping[jex.Var, RowState], eqn: Equation, other: Equation) -> list[RowState]:
        return [self._operand(known, a, b) for a, b in zip(eqn.invars, other.invars, strict=True)]

    def _operand(self, known: Mapping[jex.Var, RowState], few: Atom, many: Atom) -> RowState:
        if isinstance(few, jex.Literal) and isinstance(many, jex.Literal):
            return self._constant(few.val, many.val)
        if isinstance(few, jex.Literal) or isinstance(many, jex.Literal):
            return MIXED
        return known[few]

    def _constant(self, few: ArrayLike, many: ArrayLike) -> RowState:
        """Return the state of a number that the traces hold, or of an array that the function closes over."""
        if few is many:
            if isinstance(few, jax.core.Tracer) or np.size(few) > _SMALL:
                return Constant()
        elif isinstance(few, jax.core.Tracer) or isinstance(many, jax.core.Tracer):
            return MIXED
        if np.shape(few) != np.shape(many):
            return MIXED
        if np.size(few) > _SMALL:
            return Constant() if np.array_equal(few, many) else MIXED
        return self.measured(np.asarray(few), np.asarray(many))

    def measured(self, few: np.ndarray, many: np.ndarray) -> RowState:
        """A state that remembers small values."""
        return Constant(0, (few, many))

    def settled(self, state: RowState) -> RowState:
        """The state with the power that its values have, for an operation that does not compute them."""
        if not isinstance(state, Constant) or state.known is None:
            return state
        few, many = state.known
        for power in (0, 1, -1):
            if np.allclose(few.astype("f8") * float(self._ratio) ** power, many.astype("f8"), 1e-6, 0):
                return Constant(power, state.known)
        return MIXED

    def _results(self, step: Step, operands: list[RowState]) -> list[RowState]:
        name, count = step.eqn.primitive.name, len(step.eqn.outvars)
        few, many = called_by(step.eqn), called_by(step.other)
        if few is not None and many is not None:
            return self.closed(few, many, operands) or [MIXED] * count
        if name == "cond":
            return self._branches(step, operands) or [MIXED] * count
        if name == "scan":
            return self._scan(step, operands) or [MIXED] * count
        computed = _computed(step, operands)
        if computed is not None:
            return [self.measured(*computed)]
        chosen = _chosen(step, operands)
        if chosen is not None:
            return [operands[chosen]]
        operands = [self.settled(s) for s in operands]
        if any(isinstance(s, Mixed) for s in operands):
            return [MIXED] * count
        rule = RULES.get(name)
        found = rule(step, operands) if rule is not None else anything(step, operands)
        states = found if isinstance(found, list) else [found] * count
        return [s if is_fill(s) else _unknown(s) for s in states]

    def _branches(self, step: Step, operands: list[RowState]) -> list[RowState] | None:
        """What is certain whichever branch is taken, where rows do not decide it."""
        index, *rest = operands
        few, many = (e.params["branches"] for e in (step.eqn, step.other))
        if self.settled(index) != Constant() or len(few) != len(many):
            return None
        found = [self.closed(a, b, rest) for a, b in zip(few, many, strict=True)]
        if any(f is None for f in found):
            return None
        settled = [[self.settled(s) for s in f or ()] for f in found]
        return [functools.reduce(_joined, states) for states in zip(*settled, strict=True)]

    def _scan(self, step: Step, operands: list[RowState]) -> list[RowState] | None:
        """A loop along an axis that does not count rows: the carried states until they stay."""
        if not step.same("length", "num_carry", "num_consts", "reverse"):
            return None
        consts, carry = step.params["num_consts"], step.params["num_carry"]
        operands = [self.settled(s) for s in operands]
        # A carried number changes from round to round, and each round has its own entry of the others.
        operands = [*operands[:consts], *map(_unknown, operands[consts:])]
        fixed, carried, along = (
            operands[:consts],
            operands[consts : consts + carry],
            operands[consts + carry :],
        )
        if any(isinstance(s, RowWise) and s.axis == 0 for s in along):
            return None
        inner = [RowWise(s.axis - 1, s.power) if isinstance(s, RowWise) else s for s in along]
        bodies = step.eqn.params["jaxpr"], step.other.params["jaxpr"]
        for _ in range(_ROUNDS):
            results = self.closed(*bodies, [*fixed, *carried, *inner])
            if results is None:
                return None
            results = [self.settled(s) for s in results]
            after = [_joined(a, b) for a, b in zip(carried, results[:carry], strict=True)]
            if after == carried:
                ends = results[carry:]
                return [
                    *carried,
                    *(RowWise(s.axis + 1, s.power) if isinstance(s, RowWise) else s for s in ends),
                ]
            carried = after
        return None


def _unknown(state: RowState) -> RowState:
    return Constant(state.power) if isinstance(state, Constant) else state


def _joined(a: RowState, b: RowState) -> RowState:
    """What is certain of a value that is one or the other."""
    if a == b:
        return Constant(a.power) if isinstance(a, Constant) else a
    if isinstance(a, Constant):
        a, b = b, a
    if isinstance(a, RowWise) and isinstance(b, Constant) and a.power == b.power:
        return a
    return MIXED


def _use_of(state: RowState) -> RowUse:
    match state:
        case Constant(power=0):
            return RowUse.NONE
        case RowWise(axis=0, power=0):
            return RowUse.APART
        case Reduced(power=0):
            return RowUse.SUM
        case Reduced(power=-1):
            return RowUse.MEAN
    return RowUse.MIXED


#: Up to this many numbers, an array's values are computed too: shapes and factors such as `1 / rows` are
#: smaller, and data larger.
_SMALL = 16

#: How often a loop's body is read until the states of its carry repeat. Each reading can only lose certainty,
#: in the order Constant, RowWise, Mixed, so two or three are enough for a few carries.
_ROUNDS = 4

# --- numbers that are known -----------------------------------------------------------------------


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


def _computed(step: Step, operands: list[RowState]) -> tuple[np.ndarray, np.ndarray] | None:
    """Both traces' values of a result, where all operands' are known; else None."""
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
    if aval.size > _SMALL and not fills:
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


def _chosen(step: Step, operands: list[RowState]) -> int | None:
    """Which operand a choice takes, where the condition is known."""
    condition = operands[0] if step.eqn.primitive.name == "select_n" else None
    if not isinstance(condition, Constant) or condition.known is None:
        return None
    taken = {int(x) for part in condition.known for x in np.ravel(part)}
    return 1 + taken.pop() if len(taken) == 1 else None
