"""Whether an optimizer updates each element of a weight by itself, so that replicas can update parts.

The optimizer's update is traced for flat weights and read as a loss is read for its rows
(`_row_analysis`): every element of what it writes must depend on the elements at the same place alone. It is
traced for the true shapes too, and must be the same operations with the same numbers: an optimizer may treat
matrices in another way than vectors, as Muon and Adafactor do.

Tests: tests/virtual/strategies/test_sharded_state.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import entered
from unisono._types import ArrayLike
from unisono.sharding._gradients_in_parts import is_split
from unisono.step._keras_internals import clipped_by, clips_as_keras, of_shapes, trained_variables
from unisono.step._layout import is_added
from unisono.training._jaxprs import Trace, inner_programs
from unisono.training.rows._row_analysis import RowUse, row_uses
from unisono.training.rows._row_states import Equation

#: Lengths of flat weights with which an update is traced.
_FEW, _MANY = 3, 6


def why_whole(optimizer: keras.Optimizer) -> str | None:
    """Return why an optimizer cannot update parts of weights apart, or None where it can.

    Norms of gradients by which Keras' optimizers clip do not count: they are made of all parts.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        if type(optimizer) is not keras.optimizers.LossScaleOptimizer:
            return f"{type(optimizer).__name__} may look at whole gradients"
        optimizer = optimizer.inner_optimizer
    if not clips_as_keras(optimizer):
        return f"{type(optimizer).__name__} clips gradients in its own way"
    try:
        with entered(None), clipped_by(optimizer, lambda _: lambda grads: grads):
            return _reason(optimizer)
    except Exception as error:
        # Such as an operation along an axis that a flat weight does not have.
        return f"its update cannot be traced for parts of weights ({type(error).__name__}: {error})"


def _reason(optimizer: keras.Optimizer) -> str | None:
    trained, slots = trained_variables(optimizer), list(optimizer.variables)
    shapes = {tuple(v.shape) for v in trained}
    # What another layout has added, such as that of compression, passes through.
    added = [v for v in slots if is_added(v)]
    flat = [v for v in [*trained, *slots] if tuple(v.shape) in shapes and is_split(v.shape)] + added
    update = _Update(optimizer, trained, slots)
    uses = row_uses(lambda *given: update.flat(given, flat), update.arguments(flat), _FEW, _MANY)
    for variable, use in zip([*trained, *slots], uses, strict=True):
        wanted = RowUse.APART if any(v is variable for v in flat) else RowUse.NONE
        # What stays as it is, such as the slot of a weight without a gradient, is a constant.
        if use is not wanted and use is not RowUse.NONE:
            return f"its update of {variable.path!r} depends on more than one element at a time"
    if not _are_same(update.traced(flat, _FEW), update.traced((), 0)):
        return "its update depends on the shapes of weights"
    return None


class _Update:
    """An optimizer's update as a function of arrays."""

    def __init__(
        self, optimizer: keras.Optimizer, trained: Sequence[keras.Variable], slots: Sequence[keras.Variable]
    ) -> None:
        self._optimizer, self._trained, self._slots = optimizer, trained, slots

    def arguments(self, flat: Sequence[keras.Variable], rows: int = 1) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return stand-ins for weights, gradients and slots; flat ones are of length `rows`."""
        places = {id(v) for v in flat}
        return tuple(
            jax.ShapeDtypeStruct((rows,) if id(v) in places else tuple(v.shape), jnp.dtype(v.dtype))
            for v in [*self._trained, *self._trained, *self._slots]
        )

    def flat(self, given: Sequence[jax.Array], flat: Sequence[keras.Variable]) -> list[jax.Array]:
        """Return new weights and slots, where some variables are flat."""
        count = len(self._trained)
        weights, grads, values = given[:count], given[count : 2 * count], given[2 * count :]
        places = {
            id(v): x.shape for v, x in zip([*self._trained, *self._slots], [*weights, *values], strict=True)
        }
        with of_shapes([(v, places[id(v)]) for v in flat]):
            new, kept = self._optimizer.stateless_apply(list(values), list(grads), list(weights))
        return [jnp.asarray(x) for x in (*new, *kept)]

    def traced(self, flat: Sequence[keras.Variable], rows: int) -> jex.ClosedJaxpr:
        """Return the trace, for flat variables of length `rows`."""
        return jax.make_jaxpr(lambda *given: self.flat(given, flat))(*self.arguments(flat, rows))


def _are_same(one: Trace, other: Trace) -> bool:
    """Return whether two traces are the same operations on the same numbers, whatever the shapes."""
    if type(one) is not type(other):
        return False
    if isinstance(one, jex.ClosedJaxpr) and isinstance(other, jex.ClosedJaxpr):
        if len(one.consts) != len(other.consts):
            return False
        if not all(_are_same_numbers(a, b) for a, b in zip(one.consts, other.consts, strict=True)):
            return False
        one, other = one.jaxpr, other.jaxpr
    if len(one.eqns) != len(other.eqns):
        return False
    return all(_is_same_step(a, b) for a, b in zip(one.eqns, other.eqns, strict=True))


def _is_same_step(one: Equation, other: Equation) -> bool:
    if one.primitive is not other.primitive or len(one.invars) != len(other.invars):
        return False
    for a, b in zip(one.invars, other.invars, strict=True):
        if isinstance(a, jex.Literal) is not isinstance(b, jex.Literal):
            return False
        if isinstance(a, jex.Literal) and not _are_same_numbers(a.val, b.val):
            return False
    pairs = zip(inner_programs(one), inner_programs(other), strict=True)
    return len(inner_programs(one)) == len(inner_programs(other)) and all(_are_same(a, b) for a, b in pairs)


def _are_same_numbers(one: ArrayLike, other: ArrayLike) -> bool:
    if isinstance(one, jax.core.Tracer) or isinstance(other, jax.core.Tracer):
        return one is other
    return bool(np.array_equal(np.unique(np.asarray(one)), np.unique(np.asarray(other))))
