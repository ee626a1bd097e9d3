"""The use of rows by operations on parts of arrays, and by largest values: rules of `_row_analysis`. Pure.

A layer's state is often the largest value seen so far, or a count of rows.

Tests: tests/unit/training/test_row_analysis.py.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from unisono.training.rows._row_states import (
    MIXED,
    AccumulatedSum,
    Constant,
    Extreme,
    Operand,
    Reduced,
    RowState,
    RowWise,
    Step,
    aligned,
    anything,
    is_fill,
    is_total,
    is_zero,
    with_power,
)

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
    if step.eqn.primitive.name in ("and", "or") and step.eqn.outvars[0].aval.dtype != jnp.bool_:
        return MIXED  # bits of integers are no order
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
    if jnp.issubdtype(before, jnp.integer) and jnp.issubdtype(after, jnp.integer):
        return bool(jnp.promote_types(before, after) == after)
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


def cut(step: Step, operands: list[Operand]) -> RowState:
    """Apply to parts of an array that are whole along the axes that count rows."""
    state = operands[0]
    rows = step.counting() | ({state.axis} if isinstance(state, RowWise) else set())
    whole = all(
        e.invars[0].aval.shape[i] == e.outvars[0].aval.shape[i] for e in (step.eqn, step.other) for i in rows
    )
    rest = all(s == Constant() for s in operands[1:])
    # The first entries of a table, one for each row of the batch, differ from row to row.
    is_same = step.counting_out() <= rows or is_fill(state)
    return state if whole and rest and is_same else MIXED


def gather(step: Step, operands: list[Operand]) -> RowState:
    """Apply to rows of a table that does not depend on the batch, or entries of a row's own part."""
    table, indices = operands
    numbers = step.params["dimension_numbers"]
    if not isinstance(indices, RowWise):
        return _window_of_gather(step, operands)
    if indices.power or indices.axis == len(step.shape(1)) - 1:
        return MIXED
    if isinstance(table, RowWise):
        pairs = list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
        if (table.axis, indices.axis) not in pairs:
            return MIXED
    elif not isinstance(table, Constant) or step.counting(0):
        return MIXED
    places = [i for i in range(len(step.out_shape())) if i not in numbers.offset_dims]
    return RowWise(places[indices.axis], table.power)


def _window_of_gather(step: Step, operands: list[Operand]) -> RowState:
    """The same places of each row's part, or the same for each row."""
    table, indices = operands
    if (
        isinstance(table, Constant)
        and indices == Constant()
        and step.same("slice_sizes", "dimension_numbers")
    ):
        every = not step.counting(0) and len(step.shape(1)) - 1 not in step.counting(1)
        return Constant(table.power) if every else anything(step, operands)
    numbers, sizes = (
        step.params["dimension_numbers"],
        [e.params["slice_sizes"] for e in (step.eqn, step.other)],
    )
    if not isinstance(table, RowWise) or indices != Constant() or step.counting(1):
        return anything(step, operands)
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    whole = [
        s[table.axis] == e.invars[0].aval.shape[table.axis]
        for s, e in zip(sizes, (step.eqn, step.other), strict=True)
    ]
    if table.axis in gone or not all(whole) or step.counting() != {table.axis}:
        return MIXED
    kept = [i for i in range(len(step.shape())) if i not in gone]
    return RowWise(numbers.offset_dims[kept.index(table.axis)], table.power)


def scatter(step: Step, operands: list[Operand]) -> RowState:
    """Apply to values written to the same places of each row's part."""
    target, indices, update = operands
    numbers = step.params["dimension_numbers"]
    if isinstance(indices, RowWise):
        return _histogram(step, operands)
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [i for i in range(len(step.shape())) if i not in gone]
    rows = step.counting() | ({target.axis} if isinstance(target, RowWise) else set())
    if indices != Constant() or step.counting(1) or rows & gone:
        return MIXED
    places = {i: numbers.update_window_dims[kept.index(i)] for i in rows}
    fits = all(step.shape(2)[p] == step.shape()[i] for i, p in places.items())
    if not fits or step.counting(2) != {*places.values()}:
        return MIXED
    if isinstance(update, RowWise):
        back = {p: i for i, p in places.items()}
        if update.axis not in back:
            return MIXED
        update = RowWise(back[update.axis], update.power)
    return _written(step, target, update)


def _written(step: Step, target: Operand, update: Operand) -> Operand:
    """Return the state of a target to whose places values are written: of one power, factors of none."""
    multiplies = step.eqn.primitive.name.endswith("mul")
    if multiplies and isinstance(update, (Constant, RowWise)) and not update.power:
        update = with_power(update, getattr(target, "power", 0))
    elif multiplies:
        return MIXED
    return aligned([target, update])


def _histogram(step: Step, operands: list[Operand]) -> RowState:
    """Rows written to places that they choose themselves: added up, or the largest."""
    target, indices, update = operands
    numbers, name = step.params["dimension_numbers"], step.eqn.primitive.name.replace("-", "_")
    free = [i for i in range(len(step.shape(2))) if i not in numbers.update_window_dims]
    if not isinstance(indices, RowWise) or indices.power or indices.axis >= len(free):
        return MIXED
    if step.counting():
        return _into_own_rows(step, operands)
    is_constant = isinstance(target, Constant) and not target.power
    if name not in ("scatter_add", "scatter_max", "scatter_min") or not is_constant:
        return MIXED
    fits = step.counting(2) == {free[indices.axis]} and step.counting(1) == {indices.axis}
    if isinstance(update, RowWise):
        fits = fits and update.axis == free[indices.axis]
    if not fits or not isinstance(update, (RowWise, Constant)):
        return MIXED
    if name != "scatter_add":
        return MIXED if update.power else Extreme(name == "scatter_max")
    if is_zero(target):
        return Reduced(update.power)
    origin = target.origin if isinstance(target, Constant) else None
    return MIXED if origin is None or update.power else AccumulatedSum(origin)


def _into_own_rows(step: Step, operands: list[Operand]) -> RowState:
    """Values written to places of each row's own part, which the row chooses."""
    target, indices, update = operands
    numbers = step.params["dimension_numbers"]
    pairs = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    own = [place for place, index in pairs if isinstance(indices, RowWise) and index == indices.axis]
    free = [i for i in range(len(step.shape(2))) if i not in numbers.update_window_dims]
    if len(own) != 1 or step.counting() != {own[0]} or not isinstance(indices, RowWise):
        return MIXED
    if isinstance(update, RowWise):
        if update.axis != free[indices.axis]:
            return MIXED
        update = RowWise(own[0], update.power)
    written = _written(step, target, update)
    # Without rows in both, the places are still the row's own.
    return RowWise(own[0], written.power) if isinstance(written, Constant) else written


def update(step: Step, operands: list[Operand]) -> RowState:
    """Apply to a part overwritten by another that is whole along the axes that count rows."""
    target, update, *places = operands
    apart = {s.axis for s in (target, update) if isinstance(s, RowWise)}
    rows = step.counting() | apart
    whole = step.counting(1) <= rows and all(
        e.invars[0].aval.shape[i] == e.invars[1].aval.shape[i] for e in (step.eqn, step.other) for i in rows
    )
    return aligned([target, update]) if whole and all(s == Constant() for s in places) else MIXED
