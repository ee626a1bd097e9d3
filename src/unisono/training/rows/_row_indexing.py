"""The use of rows by operations that read or write parts of arrays: rules of `_row_analysis`. Pure.

Tests: tests/unit/training/test_row_analysis.py.
"""

from __future__ import annotations

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
    is_zero,
    with_power,
)


def cut(step: Step, operands: list[Operand]) -> RowState:
    """Apply to parts of an array that are whole along the axes that count rows."""
    state = operands[0]
    rows = step.counting() | ({state.axis} if isinstance(state, RowWise) else set())
    whole = all(
        e.invars[0].aval.shape[i] == e.outvars[0].aval.shape[i] for e in (step.eqn, step.other) for i in rows
    )
    rest = all(s == Constant() for s in operands[1:])
    return state if whole and rest else MIXED


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
    if any(step.shape(2)[p] != step.shape()[i] for i, p in places.items()) or step.counting(2) - {
        *places.values()
    }:
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
    whole = all(step.shape(0)[i] == step.shape(1)[i] for i in step.counting() | step.counting(1) | apart)
    return aligned([target, update]) if whole and all(s == Constant() for s in places) else MIXED
