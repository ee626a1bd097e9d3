"""The number of steps that a training has run.

Tests: tests/unit/estimator/test_optimizers.py.
"""

from __future__ import annotations

from typing import Any

from unisono.estimator._docstrings import Texts
from unisono.estimator._train_op import current_call
from unisono.estimator._train_op import get_global_step as _global_step
from unisono.estimator.hooks._hook import GLOBAL_STEP, HookSession

_TEXTS = Texts(
    {"graph": "any value; has no effect."},
    "In a model_fn the variable. Elsewhere, as in the `begin` of a hook, its name, which `SessionRunArgs` "
    "and `session.run` take.",
)


@_TEXTS
def get_global_step(graph: object = None) -> Any:
    """Return the variable that counts steps.

    >>> get_global_step()
    'global_step'
    """
    return GLOBAL_STEP if current_call() is None else _global_step()


@_TEXTS
def get_or_create_global_step(graph: object = None) -> Any:
    """Return the variable that counts steps, which an Estimator always has."""
    return get_global_step()


@_TEXTS
def create_global_step(graph: object = None) -> Any:
    """Return the variable that counts steps, which an Estimator always has."""
    return get_global_step()


def global_step(sess: HookSession, global_step_tensor: object) -> int:
    """Return the number of steps so far.

    Args:
        sess: session that a hook receives.
        global_step_tensor: variable or name that `get_global_step` returns.

    Returns:
        A whole number.

    >>> global_step(HookSession(global_step=lambda: 7), get_global_step())
    7
    """
    return int(sess.run(global_step_tensor))
