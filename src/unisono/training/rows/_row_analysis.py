"""The use of a batch's rows by a traced function: apart, added up, or mixed. Pure.

A function is traced twice, for a replica's number of rows and for all replicas'. Both
traces are read side by side, one operation after the other. An axis whose size differs in them
counts rows, and a number that differs was computed from the number of rows. For every value the
reading keeps what is certain: it does not depend on the rows, it has an entry for each row that
depends on this row alone, or it is a sum over all rows. What is not certain is mixed.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction

import jax
import jax.extend.core as jex
import numpy as np

from unisono._types import ArrayLike, PyTree
from unisono.training._jaxprs import called_by
from unisono.training.rows._row_indexing import of_extremes
from unisono.training.rows._row_rules import RULES, Rule, linear_in_sums
from unisono.training.rows._row_states import (
    MIXED,
    SMALL,
    AccumulatedSum,
    Constant,
    Equation,
    Extreme,
    Mixed,
    Operand,
    Reduced,
    RowState,
    RowWise,
    Step,
    anything,
    chosen,
    computed,
    is_fill,
    is_zero,
)

#: Operations with derivatives of their own.
_CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})

#: An argument or result of an operation in a trace.
Atom = jex.Var | jex.Literal


class RowUse(enum.Enum):
    """The use of rows by a result of a function."""

    NONE = "the same for any rows"
    APART = "one entry for each row along the first axis, which depends on this row alone"
    SUM = "a sum over the rows"
    MEAN = "a mean over the rows, up to a constant"
    MIXED = "not known: the value of one row may depend on others"


def row_uses(
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    few: int,
    many: int,
    differentiates: bool = False,
) -> list[RowUse]:
    """Return the use of rows by each result of a function, in the order of `jax.tree.leaves`.

    Args:
        fn: from `*args` to a pytree of arrays; traced, never computed.
        args: pytrees of arrays, or of what has their shape and type, whose first axes count rows, or
            several entries for each row. Scalars are the same for any rows.
        few: the number of rows to trace first, at least 1.
        many: another, larger number of rows.
        differentiates: see `traced_states`.

    >>> x = np.zeros((4, 3), "f4")
    >>> uses = row_uses(lambda x: (x.sum(axis=1), x.mean(), x.max()), (x,), 2, 4)
    >>> [use.name for use in uses]
    ['APART', 'MEAN', 'MIXED']
    """
    return [use_of(s) for s in traced_states(fn, args, (), few, many, (), differentiates)[1]]


def traced_states(
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kept: tuple[PyTree, ...],
    few: int,
    many: int,
    own: Collection[int] = (),
    differentiates: bool = False,
) -> tuple[jex.ClosedJaxpr, list[RowState]]:
    """Return a trace of a function, and the state of each result, in the order of `jax.tree.leaves`.

    Args:
        fn: from `*args, *kept` to a pytree of arrays; traced, never computed.
        args: see `row_uses`.
        kept: further arguments, which are the same for any rows. A result that is one of them plus a sum
            over rows is `AccumulatedSum`, with the number of it among the leaves of `kept`.
        few: the number of rows to trace first, at least 1.
        many: another, larger number of rows.
        own: the numbers of those leaves of `kept` of which each replica has its own, such as the states of
            random generators.
        differentiates: whether gradients are taken, too. Derivatives that functions have of their own must
            then treat rows as the functions do.

    >>> def step(x, count, top):
    ...     return count + (x > 0).sum(), jax.numpy.maximum(top, x.max()), x - x.mean(0)
    >>> x, count, top = np.zeros((4, 3), "f4"), np.int32(0), np.float32(0)
    >>> _, states = traced_states(step, (x,), (count, top), 2, 4)
    >>> [type(s).__name__ for s in states]
    ['AccumulatedSum', 'Extreme', 'Mixed']
    >>> states[2].cause
    'sub'
    """
    leaves, count = jax.tree.leaves((*args, *kept)), len(jax.tree.leaves(args))
    pair = traced_for(few, fn, args, kept), traced_for(many, fn, args, kept)
    start = [RowWise(0) if x.ndim else Constant() for x in leaves[:count]]
    start += [Constant(origin=i, is_own=i in own) for i in range(len(leaves) - count)]
    return pair[0], states_in_traces(*pair, Fraction(many, few), start, differentiates, few)


def traced_for(
    rows: int, fn: Callable[..., PyTree], args: tuple[PyTree, ...], kept: tuple[PyTree, ...]
) -> jex.ClosedJaxpr:
    """Return the trace of a function for a number of rows; see `traced_states`."""
    leaves, structure = jax.tree.flatten((*args, *kept))
    count = len(jax.tree.leaves(args))
    # An array may have several entries for each row.
    unit = max(1, math.gcd(*[x.shape[0] for x in leaves[:count] if x.ndim]))
    shapes = [
        jax.ShapeDtypeStruct(
            (x.shape[0] // unit * rows, *x.shape[1:]) if i < count and x.ndim else x.shape,
            jax.dtypes.canonicalize_dtype(x.dtype),
        )
        for i, x in enumerate(leaves)
    ]
    return jax.make_jaxpr(lambda *flat: jax.tree.leaves(fn(*jax.tree.unflatten(structure, flat))))(*shapes)


def states_in_traces(
    few: jex.ClosedJaxpr,
    many: jex.ClosedJaxpr,
    ratio: Fraction,
    given: Sequence[RowState],
    differentiates: bool = False,
    rows: int | None = None,
) -> list[RowState]:
    """Return the state of each result of a program, from two traces.

    Args:
        ratio: how many times as many rows the second one has.
        given: what is known of each argument.
        differentiates: see `traced_states`.
        rows: of the first trace; None where its arguments have rows of several numbers.
    """
    reader = _TraceReader(ratio, differentiates, rows)
    states = reader.closed(few, many, given)
    if states is None:
        return [Mixed(reader.difference)] * max(len(few.jaxpr.outvars), len(many.jaxpr.outvars))
    shapes = ((a.shape, b.shape) for a, b in zip(few.out_avals, many.out_avals, strict=True))
    return [_of_result(reader.settled(s), *pair) for s, pair in zip(states, shapes, strict=True)]


def _of_result(state: RowState, few: tuple[int, ...], many: tuple[int, ...]) -> RowState:
    """Return the state of a result: mixed where it has an entry for each pair of rows."""
    axis = state.axis if isinstance(state, RowWise) else 0
    others = [[*shape[:axis], *shape[axis + 1 :]] for shape in (few, many)]
    return state if others[0] == others[1] else Mixed("an axis besides the rows' own counts rows")


class _TraceReader:
    """Reads two traces of a function whose rows stand in the ratio `ratio`.

    Args:
        differentiates: whether gradients of the function's mean over rows are taken, too.
        rows: see `states_in_traces`.
    """

    def __init__(self, ratio: Fraction, differentiates: bool = False, rows: int | None = None) -> None:
        self._ratio, self._differentiates, self._rows = ratio, differentiates, rows
        #: Where the two traces first had different operations.
        self.difference = "operations that depend on the number of rows"

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
                self.difference = f"operations that depend on the number of rows: {place_of(eqn)}"
                return None
            states = self._results(
                Step(eqn, other, self._ratio, self._rows), self._operands(known, eqn, other)
            )
            for variable, state in zip(eqn.outvars, states, strict=True):
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
            if isinstance(few, jax.core.Tracer) or np.size(few) > SMALL:
                return Constant()
        elif isinstance(few, jax.core.Tracer) or isinstance(many, jax.core.Tracer):
            return MIXED
        if np.shape(few) != np.shape(many):
            return MIXED
        if np.size(few) > SMALL:
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
            kind = "c16" if few.dtype.kind == "c" else "f8"
            scaled = few.astype(kind) * float(self._ratio) ** power
            # NaN has any power, as zero has.
            if np.allclose(scaled, many.astype(kind), 1e-6, 0, equal_nan=True):
                return Constant(power, state.known)
        return MIXED

    def _results(self, step: Step, operands: list[RowState]) -> list[RowState]:
        count = len(step.eqn.outvars)
        few, many = called_by(step.eqn), called_by(step.other)
        if few is not None and many is not None:
            states = self.closed(few, many, operands) or [MIXED] * count
            if self._differentiates and step.eqn.primitive.name in _CUSTOM:
                from unisono.training.rows._row_derivatives import is_linear

                given, results = ([self.settled(s) for s in part] for part in (operands, states))
                if not is_linear(step, given, results, _TraceReader(self._ratio, rows=self._rows).closed):
                    states = [MIXED] * count
        elif step.eqn.primitive.name == "custom_linear_solve":
            states = self._solve(step, operands) or [MIXED] * count
        elif step.eqn.primitive.name == "cond":
            states = self._branches(step, operands) or [MIXED] * count
        elif step.eqn.primitive.name == "scan":
            states = self._scan(step, operands) or [MIXED] * count
        elif step.eqn.primitive.name == "while":
            states = self._while(step, operands) or [MIXED] * count
        else:
            states = self._of_operation(step, operands)
        if any(isinstance(s, Constant) and s.is_own for s in operands):
            states = [dataclasses.replace(s, is_own=True) if isinstance(s, Constant) else s for s in states]
        return [_because(s, operands, step.eqn) if isinstance(s, Mixed) else s for s in states]

    def _of_operation(self, step: Step, operands: list[RowState]) -> list[RowState]:
        """Return the states of the results of an operation that holds no program."""
        name, count = step.eqn.primitive.name, len(step.eqn.outvars)
        if _passes(step):
            return operands
        values = computed(step, operands)
        if values is not None:
            return [self.measured(*values)]
        place = chosen(step, operands)
        if place is not None:
            return [operands[place]]
        settled = [self.settled(s) for s in operands]
        if any(isinstance(s, Mixed) for s in settled):
            return [MIXED] * count
        given: list[Operand] = [s for s in settled if not isinstance(s, (Extreme, AccumulatedSum))]
        if len(given) < len(settled):
            return [of_extremes(step, settled)] * count
        rule = RULES.get(name) or _rule_of_arrays(name)
        result = rule(step, given) if rule is not None else anything(step, given)
        if isinstance(result, Mixed) and any(isinstance(s, Reduced) for s in given):
            result = linear_in_sums(step, given)
        states = result if isinstance(result, list) else [result] * count
        return [s if is_fill(s) else _unknown(s) for s in states]

    def _solve(self, step: Step, operands: list[RowState]) -> list[RowState] | None:
        """A solution of linear equations: what its program computes."""
        if not step.same("const_lengths"):
            return None
        counts = step.params["const_lengths"]
        start = counts.matvec + counts.vecmat
        solves = [e.params["jaxprs"].solve for e in (step.eqn, step.other)]
        given = [*operands[start : start + counts.solve], *operands[sum(counts) :]]
        return self.closed(solves[0], solves[1], given)

    def _branches(self, step: Step, operands: list[RowState]) -> list[RowState] | None:
        """Return the states that hold in every branch, where rows do not choose it."""
        index, *rest = operands
        few, many = (e.params["branches"] for e in (step.eqn, step.other))
        if self.settled(index) != Constant() or len(few) != len(many):
            return None
        branches = [self.closed(a, b, rest) for a, b in zip(few, many, strict=True)]
        if any(f is None for f in branches):
            return None
        settled = [[self.settled(s) for s in f or ()] for f in branches]
        return [functools.reduce(_joined, states) for states in zip(*settled, strict=True)]

    def _scan(self, step: Step, operands: list[RowState]) -> list[RowState] | None:
        """A loop along an axis that does not count rows: the carried states until they stay."""
        if not step.same("length", "num_carry", "num_consts", "reverse"):
            return None
        consts, carry = step.params["num_consts"], step.params["num_carry"]
        operands = [self.settled(s) for s in operands]
        fixed, carried = operands[:consts], operands[consts : consts + carry]
        # Each round has its own entry of the others.
        along = [s if is_fill(s) else _unknown(s) for s in operands[consts + carry :]]
        if any(isinstance(s, RowWise) and s.axis == 0 for s in along):
            return None
        inner = [RowWise(s.axis - 1, s.power) if isinstance(s, RowWise) else s for s in along]
        bodies = step.eqn.params["jaxpr"], step.other.params["jaxpr"]
        results = self._until_they_stay(bodies, fixed, carried, inner)
        if results is None:
            return None
        ends = [RowWise(s.axis + 1, s.power) if isinstance(s, RowWise) else s for s in results[carry:]]
        return [*results[:carry], *ends]

    def _while(self, step: Step, operands: list[RowState]) -> list[RowState] | None:
        """A loop that ends by a condition that is the same for any rows."""
        if not step.same("cond_nconsts", "body_nconsts"):
            return None
        first, second = step.params["cond_nconsts"], step.params["body_nconsts"]
        operands = [self.settled(s) for s in operands]
        fixed, carried = operands[first : first + second], operands[first + second :]
        names = "body_jaxpr", "cond_jaxpr"
        bodies, conditions = ([e.params[n] for e in (step.eqn, step.other)] for n in names)
        results = self._until_they_stay((bodies[0], bodies[1]), fixed, carried, [])
        if results is None:
            return None
        ends = self.closed(conditions[0], conditions[1], [*operands[:first], *results])
        return results if ends is not None and self.settled(ends[0]) == Constant() else None

    def _until_they_stay(
        self,
        bodies: tuple[jex.ClosedJaxpr, jex.ClosedJaxpr],
        fixed: list[RowState],
        carried: list[RowState],
        along: list[RowState],
    ) -> list[RowState] | None:
        """Return the states of a loop's results; None where they are not certain."""
        # A carried number changes from round to round. Zero is a sum over rows, too, and has any power.
        carried = [s if is_zero(s) else _unknown(s) for s in carried]
        for _ in range(_ROUNDS):
            results = self.closed(*bodies, [*fixed, *carried, *along])
            if results is None:
                return None
            results = [self.settled(s) for s in results]
            new = [_unknown(s) for s in results[: len(carried)]]
            after = [b if is_zero(a) else _joined(a, b) for a, b in zip(carried, new, strict=True)]
            if after == carried and not any(map(is_zero, carried)):
                return [*carried, *results[len(carried) :]]
            carried = after
        return None


def _rule_of_arrays(name: str) -> Rule | None:
    """Return the rule of an operation that few models have; such rules are loaded with the first of these."""
    from unisono.training.rows._array_rules import ARRAY_RULES

    return ARRAY_RULES.get(name)


def _passes(step: Step) -> bool:
    """Return whether an operation returns its operand."""
    if step.eqn.primitive.name in ("copy", "copy_p", "stop_gradient"):
        return True
    if step.eqn.primitive.name not in ("convert_element_type", "reshape") or not step.is_plain:
        return False
    before, after = step.eqn.invars[0].aval, step.eqn.outvars[0].aval
    return bool(before.shape == after.shape and before.dtype == after.dtype)


def _because(state: Mixed, operands: Sequence[RowState], eqn: Equation) -> Mixed:
    """Return a mixed value with its cause: a mixed operand's, or else the operation."""
    causes = [state.cause, *(s.cause for s in operands if isinstance(s, Mixed))]
    return Mixed(next(filter(None, causes), "") or place_of(eqn))


def place_of(eqn: Equation) -> str:
    """Return the name of an operation, after the names of its layers."""
    layers = str(eqn.source_info.name_stack)
    return f"{layers}: {eqn.primitive.name}" if layers else str(eqn.primitive.name)


def _unknown(state: RowState) -> RowState:
    return Constant(state.power, is_own=state.is_own) if isinstance(state, Constant) else state


def _joined(a: RowState, b: RowState) -> RowState:
    """Return the state of a value that is one or the other."""
    if isinstance(a, Constant) and isinstance(b, Constant) and a == b:
        return Constant(a.power, is_own=a.is_own and b.is_own)
    if a == b:
        return a
    if isinstance(a, Constant):
        a, b = b, a
    if isinstance(a, RowWise) and isinstance(b, Constant) and a.power == b.power:
        return a
    return MIXED


def use_of(state: RowState) -> RowUse:
    """Return the use of rows by a result of a state."""
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


#: How often a loop's body is read until the states of its carry repeat. Each reading can only lose certainty,
#: in the order Constant, RowWise, Mixed, so two or three are enough for a few carries.
_ROUNDS = 4
