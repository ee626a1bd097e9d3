"""The use of operands' rows by cuDNN's operations: attention and LSTMs on GPUs. Pure.

Without these rules a step with one of them would seem to relate rows, so that one program computed the rows
of all GPUs, which XLA cannot divide at an operation of cuDNN.

Tests: tests/unit/training/test_cudnn_rules.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.training.rows._row_states import (
    MIXED,
    Constant,
    Operand,
    Reduced,
    RowState,
    RowWise,
    Step,
    anything,
    is_zero,
)

#: The axis of rows of each operand of a recurrent network; None for its weights. Its derivative has three
#: gradients first.
_NETWORK = (0, 1, 1, None, 0)
_NETWORK_BACKWARD = (0, 1, 1, 0, 1, 1, None, 0, 0, 0)


def cudnn_rule(step: Step, operands: list[Operand]) -> RowState | list[RowState]:
    """Return the states of the results of an operation of cuDNN."""
    match step.eqn.primitive.name.removesuffix("_wrapper"):
        case "rnn_fwd":
            return _network(step, operands)
        case "rnn_bwd":
            return _network_backward(step, operands)
        case "dot_product_attention_bwd":
            return _attention_backward(step, operands)
    return _attention(step, operands)


def _network(step: Step, operands: list[Operand]) -> RowState | list[RowState]:
    """Outputs, last states, and an array that the derivative alone reads."""
    if not _are_apart(step, operands, _NETWORK) or not _is_same_network(step):
        return MIXED
    if not any(isinstance(s, RowWise) for s in operands):
        return anything(step, operands)
    return [RowWise(0), RowWise(1), RowWise(1), RowWise(0)]


def _network_backward(step: Step, operands: list[Operand]) -> RowState | list[RowState]:
    """Gradients of inputs and states for each row, and of the weights summed over the rows."""
    power = _power_of(operands[:3])
    powers = [power] * 3 + [0] * 7
    if power is None or not _is_same_network(step):
        return MIXED
    if not _are_apart(step, operands, _NETWORK_BACKWARD, powers):
        return MIXED
    if not any(isinstance(s, RowWise) for s in operands):
        return anything(step, operands)
    return [RowWise(0, power), RowWise(1, power), RowWise(1, power), Reduced(power)]


def _is_same_network(step: Step) -> bool:
    # Dropout draws the same numbers on each replica.
    return step.same(*step.params) and not step.params["dropout"]


def _attention(step: Step, operands: list[Operand]) -> RowState:
    """Outputs, and an array for the derivative: the first axes of all count rows."""
    if not _are_apart(step, operands, [0] * len(operands)):
        return MIXED
    return RowWise(0) if any(isinstance(s, RowWise) for s in operands) else anything(step, operands)


def _attention_backward(step: Step, operands: list[Operand]) -> RowState | list[RowState]:
    """Gradients of queries, keys and values, and of a bias, which all rows may share."""
    power = _power_of(operands[-1:])
    powers = [0] * (len(operands) - 1) + [power]
    if power is None or not _are_apart(step, operands, [0] * len(operands), powers):
        return MIXED
    if not any(isinstance(s, RowWise) for s in operands):
        return anything(step, operands)
    is_own = step.counting_out(3) if len(step.eqn.outvars) > 3 else None
    bias: list[RowState] = [] if is_own is None else [RowWise(0, power) if is_own else Reduced(power)]
    return [*[RowWise(0, power)] * 3, *bias]


def _power_of(gradients: Sequence[Operand]) -> int | None:
    """Return the power of the number of rows that gradients have; None where they differ."""
    powers = {s.power for s in gradients if isinstance(s, (Constant, RowWise)) and not is_zero(s)}
    return None if len(powers) > 1 else powers.pop() if powers else 0


def _are_apart(
    step: Step,
    operands: Sequence[Operand],
    axes: Sequence[int | None],
    powers: Sequence[int | None] | None = None,
) -> bool:
    """Return whether each operand has its rows along its axis, or is the same for all rows."""
    for i, (state, axis) in enumerate(zip(operands, axes, strict=True)):
        power = 0 if powers is None else powers[i]
        rows = set() if axis is None else {axis}
        if isinstance(state, RowWise):
            is_right = state.axis in rows and state.power == power
        else:
            is_right = is_zero(state) or state == Constant(power or 0)
        if not is_right or not step.counting(i) <= rows:
            return False
    return True
