"""The use of operands' rows by each of JAX' operations: the rules of `_row_analysis`. Pure.

Tests: tests/unit/training/test_row_analysis.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from unisono.training.rows._row_indexing import cut, gather, scatter, update
from unisono.training.rows._row_states import (
    MIXED,
    AccumulatedSum,
    Constant,
    Extreme,
    Mixed,
    Operand,
    Reduced,
    RowState,
    RowWise,
    Step,
    aligned,
    is_fill,
    is_total,
    is_zero,
    with_power,
)

Rule = Callable[[Step, list[Operand]], "RowState | list[RowState]"]


def elementwise(step: Step, operands: list[Operand]) -> RowState:
    """Any function of the entries at one place."""
    if step.eqn.primitive.name in _COMPARISONS and any(is_zero(s) for s in operands):
        # A power of the number of rows changes no sign.
        operands = [Constant() if isinstance(s, Constant) else s for s in operands]
    if step.shape() != step.out_shape() and step.eqn.primitive.name == "bitcast_convert_type":
        return MIXED
    if step.eqn.primitive.name == "integer_pow" and not step.same("y"):
        return MIXED
    if any(isinstance(s, Reduced) or s.power for s in operands if not isinstance(s, Mixed)):
        return MIXED
    return aligned(operands)


def _selection(step: Step, operands: list[Operand]) -> RowState:
    """Entries of one of several operands, chosen place by place: of one power."""
    which, *cases = operands
    case = aligned(cases)
    if not isinstance(which, (Constant, RowWise)) or which.power or isinstance(case, Mixed):
        return MIXED
    return aligned([with_power(which, case.power), case])


def _sum_of_two(step: Step, operands: list[Operand]) -> RowState:
    totals = [s for s in operands if isinstance(s, Reduced)]
    added = _added(step, operands)
    if added is not None:
        return added
    if not totals:
        return aligned(operands)
    if len(set(totals)) > 1 or any(isinstance(s, RowWise) for s in operands):
        return MIXED
    # A constant times the number of rows is the sum of it over the rows.
    power = totals[0].power
    fits = all(
        s == totals[0] or is_zero(s) or (isinstance(s, Constant) and s.power == power + 1) for s in operands
    )
    return totals[0] if fits else MIXED


def _added(step: Step, operands: list[Operand]) -> AccumulatedSum | None:
    """Return that a result is an argument of the function plus a sum over rows; None where it is not."""
    first, second = operands
    if step.eqn.primitive.name != "sub" and is_total(first):
        first, second = second, first
    if isinstance(first, Constant) and first.origin is not None and not first.power and is_total(second):
        return AccumulatedSum(first.origin)
    return None


def _product(step: Step, operands: list[Operand]) -> RowState:
    """Multiplication and division: one operand may have a power, and be a sum."""
    a, b = operands
    divides = step.eqn.primitive.name == "div"
    if isinstance(a, Mixed) or isinstance(b, Mixed) or (divides and isinstance(b, Reduced)):
        return MIXED
    if divides and not jnp.issubdtype(step.eqn.outvars[0].aval.dtype, jnp.inexact):
        return elementwise(step, operands)
    power = a.power - b.power if divides else a.power + b.power
    totals = [s for s in operands if isinstance(s, Reduced)]
    if totals:
        other = b if isinstance(a, Reduced) else a
        return Reduced(power) if isinstance(other, Constant) else MIXED
    return aligned([with_power(s, power) for s in operands])


def _conversion(step: Step, operands: list[Operand]) -> RowState:
    (state,) = operands
    after = step.eqn.outvars[0].aval.dtype
    is_float = jnp.issubdtype(after, jnp.inexact)
    if state == Reduced(0) and not jnp.issubdtype(step.eqn.invars[0].aval.dtype, jnp.inexact):
        return state if after != jnp.bool_ else MIXED  # counts stay whole numbers
    return state if is_float or (isinstance(state, (Constant, RowWise)) and not state.power) else MIXED


def _linear(step: Step, operands: list[Operand]) -> RowState:
    """An operation that gives a sum of rows for a sum of rows, place by place."""
    return operands[0]


def _linear_in_all(step: Step, operands: list[Operand]) -> RowState:
    """An operation that is linear in all operands together, place by place."""
    return aligned(operands)


def _reduction(step: Step, operands: list[Operand]) -> RowState:
    (state, *_), axes = operands, set(step.params["axes"])
    if not step.same("axes") or isinstance(state, Mixed):
        return MIXED
    adds = step.eqn.primitive.name == "reduce_sum"
    rows = axes & step.counting()
    match state:
        case Constant():
            if adds:
                return Constant(state.power + len(rows))
            # A product has one factor for each row.
            counts = bool(rows) and step.eqn.primitive.name in ("reduce_prod", "reduce_xor")
            return MIXED if state.power or counts else state
        case Reduced():
            return state if adds and not rows else MIXED
    if rows - {state.axis} or (state.power and not adds):
        return MIXED
    if state.axis in axes:
        return Reduced(state.power) if adds else _extreme(step)
    return RowWise(state.axis - sum(a < state.axis for a in axes), state.power)


def _extreme(step: Step) -> RowState:
    name = step.eqn.primitive.name.removeprefix("reduce_")
    # Of truth values; of integers these work on bits.
    orders = name in ("max", "min") or (name in ("or", "and") and step.eqn.invars[0].aval.dtype == jnp.bool_)
    return Extreme(name in ("max", "or")) if orders else MIXED


def _broadcast(step: Step, operands: list[Operand]) -> RowState:
    state = operands[0]
    if not step.same("broadcast_dimensions"):
        return MIXED
    if isinstance(state, RowWise):
        axis = step.params["broadcast_dimensions"][state.axis]
        kept = step.out_shape()[axis] == step.shape()[state.axis]
        kept = kept and step.other.outvars[0].aval.shape[axis] == step.other.invars[0].aval.shape[state.axis]
        return RowWise(axis, state.power) if kept else MIXED
    return state


def _reshape(step: Step, operands: list[Operand]) -> RowState:
    """Rows stay together where what lies before their axis keeps its size, and no entry is of several."""
    state = operands[0]
    if isinstance(state, Constant) and not is_fill(state) and not step.is_plain:
        state = _reshaped_constant(step, state)
    if not isinstance(state, RowWise):
        return state if isinstance(state, Constant) or step.is_plain else MIXED
    shapes = [(e.invars[0].aval.shape, e.outvars[0].aval.shape) for e in (step.eqn, step.other)]
    for axis in range(len(shapes[0][1])):
        before = [np.prod(i[: state.axis]) == np.prod(o[:axis]) for i, o in shapes]
        sizes = shapes[0][0][state.axis], shapes[0][1][axis]
        if all(before) and sizes[1] * step.ratio == shapes[1][1][axis] and step.has_each_row(*sizes):
            return RowWise(axis, state.power)
    return MIXED


def _reshaped_constant(step: Step, state: Constant) -> Operand:
    """Return a constant as what it is behind a reshape: entries of the rows' own axis may differ there."""
    if len(step.counting()) != 1 or len(step.counting_out()) != 1:
        return MIXED
    (before,), (place,) = step.counting(), step.counting_out()
    size, shape = step.shape()[before], step.out_shape()
    if size == shape[place] and np.prod(step.shape()[:before]) == np.prod(shape[:place]):
        return state
    return RowWise(before, state.power) if step.rows and size % step.rows == 0 else MIXED


def _transpose(step: Step, operands: list[Operand]) -> RowState:
    state = operands[0]
    if not isinstance(state, RowWise):
        return state
    return RowWise(list(step.params["permutation"]).index(state.axis), state.power)


def _squeeze(step: Step, operands: list[Operand]) -> RowState:
    state, dimensions = operands[0], step.params["dimensions"]
    if not isinstance(state, RowWise):
        return state
    if state.axis in dimensions or not step.same("dimensions"):
        return MIXED
    return RowWise(state.axis - sum(d < state.axis for d in dimensions), state.power)


def _along(parameter: str) -> Rule:
    """An operation along one axis, of one or more operands of one shape."""

    def rule(step: Step, operands: list[Operand]) -> RowState | list[RowState]:
        axis = step.params[parameter]
        adds = step.eqn.primitive.name == "cumsum" and isinstance(operands[0], Reduced)
        if not step.same(parameter) or any(isinstance(s, Reduced) for s in operands):
            return operands[0] if adds and step.is_plain else MIXED
        count = len(step.eqn.outvars)
        if count != len(step.other.outvars) or any(axis in step.counting_out(i) for i in range(count)):
            return MIXED  # its length follows from the number of rows
        if axis in set().union(*(step.counting(i) for i in range(len(operands)))):
            return MIXED
        moves = step.eqn.primitive.name in ("concatenate", "split", "cumsum")
        result = aligned(operands) if moves else elementwise(step, operands)
        return MIXED if isinstance(result, RowWise) and result.axis == axis else result

    return rule


def _dot(step: Step, operands: list[Operand]) -> RowState:
    """Products: rows are free, contracted, or an axis of the batch in both operands."""
    (contracted, batched), (a, b) = step.params["dimension_numbers"], operands
    parts = (Constant, RowWise)
    if not isinstance(a, parts) or not isinstance(b, parts) or not step.same("dimension_numbers"):
        return MIXED
    power = a.power + b.power
    counted = [step.counting(i) & set(contracted[i]) for i in range(2)]
    places = [_place(s, contracted[i], batched[i], len(step.shape(i))) for i, s in enumerate(operands)]
    roles = {p[0] for p in places if p is not None}
    if not roles:
        return Constant(power + len(counted[0]))
    if len(roles) > 1 or (roles == {"free"} and None not in places):
        return MIXED
    numbers = {p[1] for p in places if p is not None}
    if len(numbers) > 1 or (roles != {"contracted"} and any(counted)) or len(counted[0]) > 1:
        return MIXED
    return _dot_result(step, roles.pop(), numbers.pop(), places, power)


def _place(
    state: Operand, contracted: Sequence[int], batched: Sequence[int], rank: int
) -> tuple[str, int] | None:
    """Return a product's use of an operand's rows, and their place."""
    if not isinstance(state, RowWise):
        return None
    if state.axis in contracted:
        return "contracted", list(contracted).index(state.axis)
    if state.axis in batched:
        return "batched", list(batched).index(state.axis)
    free = [i for i in range(rank) if i not in contracted and i not in batched]
    return "free", free.index(state.axis)


def _dot_result(
    step: Step, role: str, number: int, places: list[tuple[str, int] | None], power: int
) -> RowState:
    if role == "contracted":
        return Reduced(power)
    (contracted, batched) = step.params["dimension_numbers"]
    if role == "batched":
        return RowWise(number, power)
    before = len(batched[0])
    if places[0] is None:
        before += len(step.shape(0)) - len(contracted[0]) - len(batched[0])
    return RowWise(before + number, power)


def _cudnn(step: Step, operands: list[Operand]) -> RowState | list[RowState]:
    """Apply to what cuDNN computes on GPUs."""
    # A training on CPUs does without it.
    from unisono.training.rows._cudnn_rules import cudnn_rule

    return cudnn_rule(step, operands)


def linear_in_sums(step: Step, operands: list[Operand]) -> RowState:
    """Apply to an operation that is linear in sums over rows; its other operands are not of the rows."""
    totals = [s for s in operands if isinstance(s, Reduced)]
    rest = [s for s in operands if not isinstance(s, Reduced)]
    if not step.is_plain or len(set(totals)) > 1:
        return MIXED
    name, power = step.eqn.primitive.name, totals[0].power
    data = rest[1:] if name == "select_n" and operands[0] == Constant() else rest
    if name in _LINEAR_TOGETHER and (data is not rest or name != "select_n"):
        # As in a sum of two, a constant times the number of rows is a sum over them.
        fits = [is_zero(s) or (s == Constant(power + 1) and name != "dynamic_update_slice") for s in data]
        return totals[0] if all(fits) else MIXED
    if name in _LINEAR_IN_FIRST and isinstance(operands[0], Reduced) and all(s == Constant() for s in rest):
        return totals[0]
    if name in ("dot_general", "conv_general_dilated") and len(totals) == 1 and isinstance(rest[0], Constant):
        return Reduced(totals[0].power + rest[0].power)
    return MIXED


#: Linear in all operands together, and in the first one alone.
_LINEAR_TOGETHER = frozenset(
    {"concatenate", "pad", "stack", "dynamic_update_slice", "reduce_window_sum", "select_n"}
)
_LINEAR_IN_FIRST = frozenset({"slice", "dynamic_slice", "gather", "rev", "tile", "split", "cumsum"})


def _made(step: Step, operands: list[Operand]) -> RowState:
    """Made of nothing; along rows it would say where a row lies."""
    return Constant() if step.is_plain or step.params["dimension"] not in step.counting_out() else MIXED


def _random(step: Step, operands: list[Operand]) -> RowState:
    """Each row draws its own numbers: on a replica from the replica's own stream.

    Numbers that all rows share would differ between the replicas. Those of a key that is the same on all
    replicas would be the same for the first row of each.
    """
    if isinstance(operands[0], Constant) and not operands[0].is_own:
        return MIXED
    shapes = [e.outvars[0].aval.shape for e in (step.eqn, step.other)]
    rows = [i for i, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b]
    if len(rows) != 1 or aligned(operands) not in (Constant(), RowWise(rows[0])):
        return MIXED
    return RowWise(rows[0]) if shapes[0][rows[0]] * step.ratio == shapes[1][rows[0]] else MIXED


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

#: Operations on elements that neither add up nor scale rows.
SIMPLE_ELEMENTWISE = (
    "abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil "
    "clamp cos cosh digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac "
    "integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min ne nextafter not or pow "
    "reduce_precision rem round rsqrt shift_left shift_right_arithmetic shift_right_logical sign "
    "sin sinh sqrt square tan tanh xor "
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(SIMPLE_ELEMENTWISE.split(), elementwise),
    **dict.fromkeys(("add", "sub", "add_any"), _sum_of_two),
    **dict.fromkeys(("mul", "div"), _product),
    **dict.fromkeys(("neg", "copy", "copy_p", "stop_gradient", "real", "imag", "conj"), _linear),
    "sharding_constraint": _linear,
    "complex": _linear_in_all,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    **dict.fromkeys(("slice", "dynamic_slice"), cut),
    **{f"reduce_{n}": _reduction for n in ("sum", "max", "min", "prod", "and", "or", "xor")},
    **dict.fromkeys(("argmax", "argmin"), _reduction),
    "convert_element_type": _conversion,
    "select_n": _selection,
    **{f"dot_product_attention_{n}{w}": _cudnn for n in ("fwd", "bwd") for w in ("", "_wrapper")},
    **dict.fromkeys(("rnn_fwd", "rnn_bwd"), _cudnn),
    **dict.fromkeys(("random_bits", "random_gamma"), _random),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "sort": _along("dimension"),
    "split": _along("axis"),
    "top_k": _along("axis"),
    "dynamic_update_slice": update,
    **dict.fromkeys((f"scatter{sign}{n}" for n in ("add", "mul", "max", "min") for sign in "_-"), scatter),
    "scatter": scatter,
    "concatenate": _along("dimension"),
    "dot_general": _dot,
    "gather": gather,
    "iota": _made,
}
