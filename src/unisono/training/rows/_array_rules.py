"""The use of rows by operations that few models have: rules of `_row_analysis`. Pure.

Convolutions, windows, functions of matrices; arrays that are stacked, repeated, reversed or padded.

Tests: tests/unit/training/test_row_analysis.py.
"""

from __future__ import annotations

from unisono.training.rows._row_rules import Rule, elementwise
from unisono.training.rows._row_states import (
    MIXED,
    Constant,
    Operand,
    Reduced,
    RowState,
    RowWise,
    Step,
    aligned,
    anything,
    is_fill,
    with_power,
)


def _window(step: Step, operands: list[Operand]) -> RowState:
    """Pooling: a window of one row."""
    params = step.params
    names = [n for n in ("window_dimensions", "window_strides", "padding") if n in params]
    if not step.same(*names) or not all(s == Constant() for s in operands[1:]):
        return MIXED
    alone = all(
        params["window_dimensions"][i] == params["window_strides"][i] == 1
        and tuple(params["padding"][i]) == (0, 0)
        for i in step.counting()
    )
    adds = step.eqn.primitive.name == "reduce_window_sum"
    return (aligned(operands[:1]) if adds else elementwise(step, operands[:1])) if alone else MIXED


def _window_gradient(step: Step, operands: list[Operand]) -> RowState:
    """Add the gradient of each window to its largest entry: windows of one row."""
    source, pooled = operands
    names = ("window_dimensions", "window_strides", "padding")
    alone = step.same(*names) and all(
        step.params["window_dimensions"][i] == step.params["window_strides"][i] == 1
        and tuple(step.params["padding"][i]) == (0, 0)
        for i in step.counting(0) | step.counting(1)
    )
    if not alone or not isinstance(source, (Constant, RowWise)) or pooled not in (Constant(), RowWise(0)):
        return MIXED
    return aligned([source, with_power(pooled, source.power)])


def _convolution(step: Step, operands: list[Operand]) -> RowState:
    """Rows are the images; in the gradient of a kernel they are summed up, as input channels."""
    image, kernel = operands
    numbers, params = step.params["dimension_numbers"], step.params
    parts = (Constant, RowWise)
    if not step.same("dimension_numbers") or not isinstance(image, parts) or not isinstance(kernel, parts):
        return MIXED
    power, counts = image.power + kernel.power, (step.counting(0), step.counting(1))
    rows = numbers.lhs_spec[0]
    if isinstance(kernel, Constant) and not counts[1] and params["batch_group_count"] == 1:
        if isinstance(image, RowWise):
            return RowWise(numbers.out_spec[0], power) if image.axis == rows else MIXED
        return Constant(power) if counts[0] <= {rows} else MIXED
    summed = {numbers.lhs_spec[1]}, {numbers.rhs_spec[1]}
    places = [{s.axis} if isinstance(s, RowWise) else set() for s in (image, kernel)]
    fits = params["feature_group_count"] == 1 and counts == summed
    if not fits or not places[0] <= summed[0] or not places[1] <= summed[1]:
        return MIXED
    return Reduced(power) if any(places) else Constant(power + 1)


def _matrices(step: Step, operands: list[Operand]) -> RowState | list[RowState]:
    """Functions of matrices in the last two axes, or of series in the last ones."""
    axes, name = 2, step.eqn.primitive.name
    result: RowState
    if name == "fft":
        axes, result = len(step.params["fft_lengths"]), aligned(operands)
    elif name == "triangular_solve" and operands[0] in (Constant(), RowWise(0)):
        result = aligned([with_power(operands[0], getattr(operands[1], "power", 0)), operands[1]])
    else:
        result = elementwise(step, operands)
    if not isinstance(result, RowWise) or result.axis >= len(step.shape()) - axes:
        return anything(step, operands)
    shapes = [[v.aval.shape for v in e.outvars] for e in (step.eqn, step.other)]
    return [result if few != many else MIXED for few, many in zip(*shapes, strict=True)]


def _unstack(step: Step, operands: list[Operand]) -> RowState:
    state, axis = operands[0], step.params["axis"]
    if not step.same("axis") or axis in step.counting() or not isinstance(state, (Constant, RowWise)):
        return state if isinstance(state, Reduced) and step.is_plain else MIXED
    return RowWise(state.axis - (axis < state.axis), state.power) if isinstance(state, RowWise) else state


def _stack(step: Step, operands: list[Operand]) -> RowState:
    result, axis = elementwise(step, operands), step.params["axis"]
    if not step.same("axis") or len(step.eqn.invars) != len(step.other.invars):
        return MIXED
    return RowWise(result.axis + (axis <= result.axis)) if isinstance(result, RowWise) else result


def _tile(step: Step, operands: list[Operand]) -> RowState:
    state, repeats = operands[0], [e.params["reps"] for e in (step.eqn, step.other)]
    if isinstance(state, Constant):
        axes = [i for i, (a, b) in enumerate(zip(*repeats, strict=True)) if a != b and step.shape()[i] > 1]
        if not axes or is_fill(state):
            return state
        # Of several entries, a row has its own repetition.
        each = len(axes) == 1 and step.rows and repeats[0][axes[0]] % step.rows == 0
        return RowWise(axes[0], state.power) if each else MIXED
    alone = isinstance(state, RowWise) and all(r[state.axis] == 1 for r in repeats)
    return state if alone else MIXED


def _reverse(step: Step, operands: list[Operand]) -> RowState:
    turned = set(step.params["dimensions"])
    own = {operands[0].axis} if isinstance(operands[0], RowWise) else set()
    return MIXED if turned & (step.counting() | own) or not step.same("dimensions") else operands[0]


def _several(step: Step, operands: list[Operand]) -> list[RowState]:
    """Each operand passes."""
    return list(operands)


def _pad(step: Step, operands: list[Operand]) -> RowState:
    config = step.params["padding_config"]
    rows = step.counting()
    fits = step.same("padding_config") and all(tuple(config[i]) == (0, 0, 0) for i in rows)
    return aligned(operands) if fits else MIXED


#: By the names of operations.
ARRAY_RULES: dict[str, Rule] = {
    "conv_general_dilated": _convolution,
    "rev": _reverse,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "pad": _pad,
    "optimization_barrier": _several,
    **dict.fromkeys(("reduce_window_max", "reduce_window_min", "reduce_window_sum"), _window),
    "select_and_scatter_add": _window_gradient,
    **dict.fromkeys(("fft", "lu", "qr", "svd", "eigh", "cholesky", "triangular_solve"), _matrices),
}
