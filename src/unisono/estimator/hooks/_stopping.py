"""Hooks that end the loop, act at its end, or wait.

Tests: tests/unit/estimator/test_hooks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono._types import PyTree
from unisono.estimator._collections import fetch_in_all_runs
from unisono.estimator.hooks._hook import (
    HookSession,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)


class StopAtStepHook(SessionRunHook):
    """End the loop after so many steps, or at a step.

    Args:
        num_steps: how many steps run.
        last_step: the number of the last step; one of the two must be given.

    Raises:
        InvalidArgumentError: both are given, or none.

    >>> hook = StopAtStepHook(last_step=1000)
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if (num_steps is None) == (last_step is None):
            raise InvalidArgumentError(
                f"One of the two must be given. Received: num_steps={num_steps!r}, last_step={last_step!r}."
            )
        self._num_steps, self._last_step = num_steps, last_step

    def after_create_session(self, session: HookSession, coord: object) -> None:
        """Count from the step at which the loop begins."""
        if self._last_step is None:
            self._last_step = session.global_step + (self._num_steps or 0)

    def steps_until_next(self, global_step: int) -> int:
        """Return the steps until the last one."""
        return max(1, (self._last_step or 0) - global_step)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """End the loop if it is time."""
        if run_context.session.global_step >= (self._last_step or 0):
            run_context.request_stop()


class FinalOpsHook(SessionRunHook):
    """Read values when the loop ends.

    Args:
        final_ops: values of the model_fn, names of such, variables, or lists and dicts of these.
        final_ops_feed_dict: must be None.

    >>> FinalOpsHook("loss").final_ops_values is None
    True
    """

    def __init__(self, final_ops: PyTree, final_ops_feed_dict: object = None) -> None:
        self._final_ops = jax.tree.map(lambda leaf: fetch_in_all_runs(leaf, "final"), final_ops)
        self._feed_dict = final_ops_feed_dict
        self._values: PyTree = None

    @property
    def final_ops_values(self) -> PyTree:
        """The values of the last step; None before the end."""
        return self._values

    def steps_until_next(self, global_step: int) -> None:
        """Return None: it acts at the end."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        """Ask for the values, any of which may be the last ones."""
        return SessionRunArgs(self._final_ops)

    def end(self, session: HookSession) -> None:
        """Read the values."""
        if self._final_ops is not None:
            self._values = session.run(self._final_ops, self._feed_dict)


class GlobalStepWaiterHook(SessionRunHook):
    """Wait until a step is reached, as workers of TensorFlow 1 do that begin one after the other.

    Here one loop counts the steps, and nothing else could reach that step: it must be behind.

    Args:
        wait_until_step: the step.

    Raises:
        UnsupportedError: in `before_run`, where the step is not reached yet.

    >>> hook = GlobalStepWaiterHook(0)
    """

    def __init__(self, wait_until_step: int) -> None:
        self._step = wait_until_step
        self._has_started = False

    def steps_until_next(self, global_step: int) -> None:
        """Return None: it acts before the first step."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Check the step once."""
        step = run_context.session.global_step
        if not self._has_started and step < self._step:
            raise UnsupportedError(
                f"Training would wait for ever: one loop counts its steps, and is at {step}. Received: "
                f"wait_until_step={self._step}. Leave this hook out: workers here begin together."
            )
        self._has_started = True
        return None


class FeedFnHook(SessionRunHook):
    """Named for its error: there is no graph whose tensors could be replaced.

    Args:
        feed_fn: any value; has no effect.

    Raises:
        UnsupportedError: always.

    >>> FeedFnHook(dict)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    unisono.UnsupportedError: There is no graph whose tensors could be replaced. ...
    """

    def __init__(self, feed_fn: Callable[[], Any]) -> None:
        raise UnsupportedError(
            "There is no graph whose tensors could be replaced. Received: a FeedFnHook. Let the input_fn "
            "make the values, and read them from `features` in the model_fn."
        )
