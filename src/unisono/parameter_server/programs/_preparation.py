"""What happens to gradients before they are pushed, and what the servers' update must therefore leave out.

Keras' optimizers unscale and clip gradients as the first part of an update. That part looks at all gradients
(`global_clipnorm`, the check for infinities of `LossScaleOptimizer`), and no server has all of them: the
worker does it. The update on a server is Keras' own without that part.

A learning rate that a function gives, such as one that falls with the step's own count, is computed by the
worker, too, and goes to every server.

An optimizer that accumulates gradients clips their sum, which the servers hold: its gradients are pushed as
they are. So are those of an optimizer with its own `apply`, of which it is not known what it does first.

Tests: tests/virtual/parameter_server/chief/test_server_update.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from unisono._system._blocks import set_attribute
from unisono.step._keras_internals import (
    applies_as_keras,
    are_finite,
    clip_gradients,
    clipped_by,
    finite_by,
    held_rate,
    stored_dtype,
    trained_variables,
)
from unisono.step._layout import Gradients

#: The name of a flag that goes to every server: whether all gradients of a step were finite.
FINITE = "finite"


#: Values and gradients of fewer bytes travel exactly, as `CompressedAllReduce` sums them.
_EXACT_BELOW = 8192


def rounded_to(variable: keras.Variable, dtype: str | None) -> str | None:
    """Return the type in which a variable's value or gradient travels; None for the variable's own.

    Args:
        dtype: of large ones in float32, `push_dtype` or `pull_dtype` of a strategy.
    """
    is_large = stored_dtype(variable) == "float32" and 4 * math.prod(variable.shape) >= _EXACT_BELOW
    return dtype if is_large else None


def extras_of(optimizer: keras.Optimizer) -> tuple[str, ...]:
    """Return the names of the arrays that a push carries to every server, besides gradients."""
    finite = (FINITE,) if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else ()
    return (*finite, *_rates(optimizer))


def extra_spec(name: str) -> jax.ShapeDtypeStruct:
    """Return shape and type of what a push carries to every server."""
    dtype = np.bool_ if name == FINITE else jax.dtypes.canonicalize_dtype(np.float64)
    return jax.ShapeDtypeStruct((), dtype)


def _rates(optimizer: keras.Optimizer) -> dict[str, keras.Optimizer]:
    """Return the optimizers whose learning rate a function gives, by the name of the rate.

    It may be computed by the step, as from the number of steps: no server can do that.
    """
    parts = [part for part, _ in _parts(_inner(optimizer))]
    return {f"rate {i}": part for i, part in enumerate(parts) if _is_function(held_rate(part))}


def _inner(optimizer: keras.Optimizer) -> keras.Optimizer:
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if is_scaled else optimizer


def prepare_gradients(
    optimizer: keras.Optimizer, grads: Gradients, values: Sequence[jax.Array]
) -> tuple[list[jax.Array | None], dict[str, jax.Array]]:
    """Return gradients as the servers take them, and what goes to every server; traced.

    Args:
        optimizer: built.
        grads: one for each variable that it trains; None for one without.
        values: of the optimizer's variables, with which the loss was scaled.
    """
    rates = {
        name: keras.ops.cast(part.learning_rate, extra_spec(name).dtype)
        for name, part in _rates(optimizer).items()
    }
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return _clipped(optimizer, list(grads)), rates
    finite = are_finite(optimizer, [g for g in grads if g is not None])
    held = {id(v): value for v, value in zip(optimizer.variables, values, strict=True)}
    # With the scale of this very step: another worker's push may have changed the servers' meanwhile.
    scale = held[id(optimizer.dynamic_scale)]
    unscaled = [
        g if g is None or v.overwrite_with_gradient else keras.ops.divide(g, scale)
        for g, v in zip(grads, trained_variables(optimizer), strict=True)
    ]
    return _clipped(optimizer.inner_optimizer, unscaled), {FINITE: finite, **rates}


def _clipped(optimizer: keras.Optimizer, grads: list[jax.Array | None]) -> list[jax.Array | None]:
    """Unscale and clip gradients in the order in which `Optimizer.apply` does."""
    for part, numbers in _parts(optimizer):
        # What Keras calls a gradient of these is their next value.
        given = {
            i: g
            for i, v in zip(numbers, trained_variables(part), strict=True)
            if (g := grads[i]) is not None and not v.overwrite_with_gradient
        }
        if not given or not _is_prepared(part):
            continue
        if part.loss_scale_factor is not None:
            given = {i: g / part.loss_scale_factor for i, g in given.items()}
        for i, clipped in zip(given, clip_gradients(part, list(given.values())), strict=True):
            grads[i] = clipped
    return grads


def _parts(optimizer: keras.Optimizer) -> list[tuple[keras.Optimizer, list[int]]]:
    """Return the optimizers that apply gradients, each with the numbers of its variables."""
    trained = {id(v): i for i, v in enumerate(trained_variables(optimizer))}
    if not isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return [(optimizer, list(trained.values()))]
    return [(one, [trained[id(v)] for v in trained_variables(one)]) for one in optimizer.optimizers]


def _is_prepared(optimizer: keras.Optimizer) -> bool:
    return not optimizer.gradient_accumulation_steps and applies_as_keras(optimizer)


@contextlib.contextmanager
def of_prepared_gradients(
    optimizer: keras.Optimizer, grads: Gradients, extras: Mapping[str, jax.Array]
) -> Iterator[None]:
    """Let an optimizer's update leave out what `prepare_gradients` has done."""
    with contextlib.ExitStack() as stack:
        for name, part in _rates(optimizer).items():
            stack.enter_context(_at_rate(part, extras[name]))
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            stack.enter_context(finite_by(optimizer, lambda _: lambda _: extras[FINITE]))
            optimizer = optimizer.inner_optimizer
            stack.enter_context(_updating_by(optimizer, grads))
        for part, _ in _parts(optimizer):
            if _is_prepared(part):
                stack.enter_context(clipped_by(part, lambda _: lambda grads: grads))
                stack.enter_context(set_attribute(part, "loss_scale_factor", None))
        yield


def _is_function(rate: object) -> bool:
    return callable(rate) and not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)


@contextlib.contextmanager
def _at_rate(optimizer: keras.Optimizer, rate: jax.Array) -> Iterator[None]:
    """Let an optimizer, whose learning rate a function gives, take another one."""
    before, optimizer.learning_rate = held_rate(optimizer), lambda: rate
    try:
        yield
    finally:
        optimizer.learning_rate = before


@contextlib.contextmanager
def _updating_by(optimizer: keras.Optimizer, grads: Gradients) -> Iterator[None]:
    """Let an inner optimizer take these gradients, which a worker has unscaled, and not those it is given."""
    original = optimizer.stateless_apply

    def stateless_apply(values: Sequence[Any], _: Gradients, weights: Sequence[Any]) -> Any:
        return original(values, list(grads), weights)

    vars(optimizer)["stateless_apply"] = stateless_apply
    try:
        yield
    finally:
        del vars(optimizer)["stateless_apply"]
