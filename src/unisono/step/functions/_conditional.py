"""One of two functions of a step, chosen by a traced value; both may assign variables.

`jax.lax.cond` takes pure functions: what a branch assigns becomes a result of it, and the other branch
returns the value from before.

Tests: tests/virtual/training/stateful/test_forms.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import keras

from unisono._types import PyTree
from unisono.step._program import current_frame
from unisono.step._scope import StateScope
from unisono.step.eager._recording import recording_here

if TYPE_CHECKING:
    from unisono.step._value_handle import VariableValue


Value = TypeVar("Value")


def cond(pred: PyTree, true_fn: Callable[[], Value], false_fn: Callable[[], Value]) -> Value:
    """Return the result of one of two functions; in a step, keep what it assigns."""
    if recording_here() is not None:
        # In eager code the value is there, as in TensorFlow.
        return true_fn() if bool(jnp.asarray(keras.ops.convert_to_tensor(pred))) else false_fn()
    frame = current_frame()
    if frame is None or not frame.scope.is_innermost:
        chosen: Value = keras.ops.cond(pred, true_fn, false_fn)
        return chosen
    return conditional(frame.scope, pred, true_fn, false_fn)


def conditional(
    scope: StateScope, pred: Any, true_fn: Callable[[], Value], false_fn: Callable[[], Value]
) -> Value:
    """Return the result of one of two functions, and keep what it assigns."""

    def outcome(fn: Callable[[], Value]) -> tuple[Value, dict[int, VariableValue]]:
        before = dict(scope.state_mapping)
        try:
            result = fn()
            after = scope.state_mapping
            return result, {k: v for k, v in after.items() if before.get(k) is not v}
        finally:
            scope.state_mapping = before

    changed: dict[int, None] = {}

    def learn(fn: Callable[[], Value]) -> None:
        changed.update(dict.fromkeys(outcome(fn)[1]))

    for fn in (true_fn, false_fn):
        jax.eval_shape(lambda fn=fn: learn(fn))
    current = {k: jnp.asarray(scope.get_current_value(scope.seen[k])) for k in changed}

    def branch(fn: Callable[[], Value]) -> Callable[[], tuple[Value, list[jax.Array]]]:
        def run() -> tuple[Value, list[jax.Array]]:
            result, new = outcome(fn)
            return result, [jnp.asarray(new.get(k, x), x.dtype) for k, x in current.items()]

        return run

    chosen: tuple[Value, list[jax.Array]] = jax.lax.cond(
        jnp.asarray(pred, bool), branch(true_fn), branch(false_fn)
    )
    result, values = chosen
    scope.state_mapping.update(zip(current, values, strict=True))
    return result
