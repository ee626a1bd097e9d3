"""Functions with derivatives of their own: what these do with the rows of a batch. Pure.

The trace of a forward pass shows a function with `jax.custom_vjp` or `jax.custom_jvp`, and not its
derivative, which may be anything: a gradient that is divided by its norm over all rows, or clipped.

Tests: tests/unit/training/test_row_analysis.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from unisono.training._jaxprs import called_by, operations
from unisono.training.rows._row_states import (
    Constant,
    Equation,
    Mixed,
    Reduced,
    RowState,
    RowWise,
    Step,
    is_zero,
)

#: A `jax.extend.core.Var` of a trace, which has a shape and a type; see `Equation`.
Variable: TypeAlias = Any

#: Gradients of a mean over rows: what a derivative does with the factor shows whether it is linear.
_POWER = -1


#: From two traces and what is known of their arguments to what is known of their results; None where the
#: traces differ.
Reading = Callable[[jex.ClosedJaxpr, jex.ClosedJaxpr, Sequence[RowState]], "list[RowState] | None"]


def is_linear(
    step: Step, operands: Sequence[RowState], results: Sequence[RowState], reading: Reading
) -> bool:
    """Return whether the derivative of a function is right on replicas, for each row or summed over rows.

    Args:
        step: the call of the function.
        operands: what is known of its operands, with the powers that they have.
        results: what is known of its results.
        reading: reads the derivative.
    """
    ends = [s for s, v in zip(results, step.eqn.outvars, strict=True) if _has_gradient(v)]
    if any(isinstance(s, Mixed) for s in results):
        return True  # nothing is claimed
    if not all(isinstance(s, (Constant, RowWise)) for s in ends):
        return False
    known = {v: s for v, s in zip(step.eqn.invars, operands, strict=True) if isinstance(v, jex.Var)}
    if _is_linear_forwards(step, known, ends, reading):
        return True
    gradients = [Reduced(_POWER) if isinstance(s, Constant) else _times(s, _POWER) for s in ends]
    derivatives = reading(_derivative(step.eqn), _derivative(step.other), [*known.values(), *gradients])
    varied = [s for v, s in known.items() if _has_gradient(v)]
    return derivatives is not None and all(map(_is_right, varied, derivatives))


def _is_linear_forwards(
    step: Step, known: Mapping[Variable, RowState], ends: Sequence[RowState], reading: Reading
) -> bool:
    """Return whether the forward derivative shows it, whose trace takes half the time; False decides nothing.

    A linear function that keeps rows apart does so in the other direction, too.
    """
    varied = [s for v, s in known.items() if _has_gradient(v)]
    is_apart = all(isinstance(s, RowWise) and s.power == 0 for s in (*varied, *ends))
    if not is_apart or step.eqn.primitive.name != "custom_jvp_call":
        return False
    traces = [_forward_derivative(eqn) for eqn in (step.eqn, step.other)]
    # A function of the tangents could have another derivative backwards.
    if any("custom_vjp_call" in operations(trace) for trace in traces):
        return False
    tangents = reading(traces[0], traces[1], [*known.values(), *(_times(s, _POWER) for s in varied)])
    return tangents is not None and all(
        is_zero(a) or a == _times(s, _POWER) for a, s in zip(tangents, ends, strict=True)
    )


def alone(program: Any, eqn: Any, variables: Sequence[Any]) -> jex.ClosedJaxpr:
    """Return the program of one operation.

    Args:
        program: any, from which it gets names: without them JAX warns.
        variables: its arguments, each once.
    """
    changed = program.replace(
        constvars=[],
        invars=list(variables),
        outvars=list(eqn.outvars),
        eqns=[eqn],
        effects=eqn.effects,
        debug_info=program.debug_info.with_unknown_names(),
    )
    return jex.ClosedJaxpr(changed, ())


def _derivative(eqn: Equation) -> jex.ClosedJaxpr:
    """Return a trace from operands, and gradients of the results, to gradients of the operands."""

    def backward(operands: list[jax.Array], gradients: list[jax.Array]) -> list[jax.Array]:
        return list(jax.vjp(*_varied(eqn, operands))[1](gradients))

    return jax.make_jaxpr(backward)(_shapes(_variables(eqn)), _shapes(filter(_has_gradient, eqn.outvars)))


def _forward_derivative(eqn: Equation) -> jex.ClosedJaxpr:
    """Return a trace from operands, and tangents of the operands, to tangents of the results."""

    def forward(operands: list[jax.Array], tangents: list[jax.Array]) -> list[jax.Array]:
        function, *values = _varied(eqn, operands)
        return list(jax.jvp(function, values, tangents)[1])

    variables = _variables(eqn)
    return jax.make_jaxpr(forward)(_shapes(variables), _shapes(filter(_has_gradient, variables)))


def _varied(eqn: Equation, operands: Sequence[jax.Array]) -> list[Any]:
    """Return the function from operands with gradients to results with gradients, and these operands."""
    called: Any = called_by(eqn)
    variables = _variables(eqn)
    run = jex.jaxpr_as_fun(alone(called.jaxpr, eqn, variables))
    varied = [i for i, v in enumerate(variables) if _has_gradient(v)]

    def function(*some: jax.Array) -> list[jax.Array]:
        every = list(operands)
        for i, x in zip(varied, some, strict=True):
            every[i] = x
        return [x for x, v in zip(run(*every), eqn.outvars, strict=True) if _has_gradient(v)]

    return [function, *(operands[i] for i in varied)]


def _variables(eqn: Equation) -> list[Variable]:
    """Return the operands that are no numbers, each once."""
    return list(dict.fromkeys(v for v in eqn.invars if isinstance(v, jex.Var)))


def _shapes(variables: Iterable[Variable]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]


def _has_gradient(variable: Variable) -> bool:
    return bool(jnp.issubdtype(variable.aval.dtype, jnp.inexact))


def _times(state: RowState, power: int) -> RowState:
    return RowWise(state.axis, state.power + power) if isinstance(state, RowWise) else state


def _is_right(operand: RowState, gradient: RowState) -> bool:
    if is_zero(gradient) or (isinstance(operand, RowWise) and gradient == _times(operand, _POWER)):
        return True
    # A constant that has rows is a weight for each of them.
    of_rows = isinstance(gradient, RowWise) and gradient.power == _POWER
    return isinstance(operand, Constant) and (of_rows or gradient == Reduced(_POWER))
