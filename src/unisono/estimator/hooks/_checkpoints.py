"""Checkpoints every so many steps or seconds, and what runs before and after each; evaluations of them.

Tests: tests/unit/estimator/test_hooks.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unisono._errors import InvalidArgumentError
from unisono.estimator.hooks._hook import HookSession, SessionRunContext, SessionRunHook
from unisono.estimator.hooks._timer import IntervalHook

if TYPE_CHECKING:
    from unisono.estimator._estimator import Estimator

_LOG = logging.getLogger("unisono")


class CheckpointSaverListener:
    """Code that runs before and after each checkpoint of a `CheckpointSaverHook`.

    >>> class Printer(CheckpointSaverListener):
    ...     def after_save(self, session, global_step_value):
    ...         print("saved", global_step_value)
    >>> Printer().after_save(None, 3)
    saved 3
    """

    def begin(self) -> None:
        """Run once, before the first step."""

    def before_save(self, session: HookSession, global_step_value: int) -> None:
        """Run before a checkpoint is written.

        Args:
            session: reads values.
            global_step_value: the number of steps so far.
        """

    def after_save(self, session: HookSession, global_step_value: int) -> bool | None:
        """Run after a checkpoint was written.

        Args:
            session: reads values.
            global_step_value: the number of steps so far.

        Returns:
            True to end the training.
        """
        return None

    def end(self, session: HookSession, global_step_value: int) -> None:
        """Run once, when the loop has ended without an error.

        Args:
            session: reads values.
            global_step_value: the number of steps.
        """


class CheckpointSaverHook(IntervalHook):
    """Write a checkpoint when the loop begins, every so many steps or seconds, and at the end.

    The checkpoints are the Estimator's, in its `model_dir`.

    Args:
        checkpoint_dir: the Estimator's `model_dir`.
        save_secs: the number of seconds between two checkpoints.
        save_steps: the number of steps between two checkpoints.
        saver: must be None: the Estimator knows what it saves.
        checkpoint_basename: string; has no effect.
        scaffold: any value; has no effect.
        listeners: what runs before and after each checkpoint.
        save_graph_def: bool; has no effect, because there is no graph.

    Raises:
        InvalidArgumentError: both or none of seconds and steps are given, or there is a `saver`.

    >>> hook = CheckpointSaverHook("/tmp/model", save_steps=100)
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        save_secs: float | None = None,
        save_steps: int | None = None,
        saver: object = None,
        checkpoint_basename: str = "model.ckpt",
        scaffold: object = None,
        listeners: Sequence[CheckpointSaverListener] | None = None,
        save_graph_def: bool = True,
    ) -> None:
        if saver is not None:
            raise InvalidArgumentError(
                f"The Estimator itself saves its variables. Received: saver={saver!r}. Leave it out."
            )
        super().__init__(save_secs, save_steps)
        self.checkpoint_dir = os.fspath(checkpoint_dir)
        self._listeners = list(listeners or ())

    def add_listener(self, listener: CheckpointSaverListener) -> None:
        """Call one more listener before and after each checkpoint.

        Args:
            listener: the listener.
        """
        self._listeners.append(listener)

    def begin(self) -> None:
        """Call the listeners' `begin`."""
        for listener in self._listeners:
            listener.begin()

    def after_create_session(self, session: HookSession, coord: object) -> None:
        """Write the first checkpoint."""
        self._save(session, session.global_step)

    def _act(self, run_context: SessionRunContext, step: int) -> None:
        if self._save(run_context.session, step):
            run_context.request_stop()

    def end(self, session: HookSession) -> None:
        """Write the last checkpoint, and call the listeners' `end`."""
        step = session.global_step
        if step != self._timer.last_triggered_step():
            self._save(session, step)
        for listener in self._listeners:
            listener.end(session, step)

    def _save(self, session: HookSession, step: int) -> bool:
        """Write a checkpoint; return whether a listener wants to stop."""
        self._timer.update_last_triggered_step(step)
        for listener in self._listeners:
            listener.before_save(session, step)
        _LOG.info("Saving checkpoints for %d into %s.", step, self.checkpoint_dir)
        session.save()
        # All listeners are called, even if one stops the training.
        stops = [bool(listener.after_save(session, step)) for listener in self._listeners]
        if any(stops):
            _LOG.info("A CheckpointSaverListener has ended the training after step %d.", step)
        return any(stops)


class InMemoryEvaluatorHook(IntervalHook):
    """Evaluate when training begins, every so many steps, and at its end.

    TensorFlow's hook shares the variables of the session. This one writes a checkpoint and evaluates that, so
    that training and evaluation hold variables of their own.

    Args:
        estimator: whose training; it evaluates, too.
        input_fn: of the evaluation.
        steps: the number of its batches; None for all.
        hooks: hooks of the evaluation.
        name: of the evaluation, for its event files.
        every_n_iter: the number of steps between two evaluations.

    Raises:
        InvalidArgumentError: `every_n_iter` is not positive.

    >>> from unisono import estimator
    >>> hook = InMemoryEvaluatorHook(estimator.BaselineRegressor(), lambda: ({}, [0.0]), every_n_iter=10)
    """

    def __init__(
        self,
        estimator: Estimator,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        name: str | None = None,
        every_n_iter: int = 100,
    ) -> None:
        if every_n_iter is None or every_n_iter <= 0:
            raise InvalidArgumentError(f"`every_n_iter` must be positive. Received: {every_n_iter!r}.")
        super().__init__(None, every_n_iter)
        self._estimator, self._input_fn, self._steps = estimator, input_fn, steps
        self._hooks, self._name = hooks, name

    def after_create_session(self, session: HookSession, coord: object) -> None:
        """Evaluate before the first step."""
        self._evaluate(session, session.global_step)

    def _act(self, run_context: SessionRunContext, step: int) -> None:
        self._evaluate(run_context.session, step)

    def end(self, session: HookSession) -> None:
        """Evaluate the last step, if it is not done."""
        step = session.global_step
        if step != self._timer.last_triggered_step():
            self._evaluate(session, step)

    def _evaluate(self, session: HookSession, step: int) -> None:
        self._timer.update_last_triggered_step(step)
        self._estimator.evaluate(
            self._input_fn,
            steps=self._steps,
            hooks=self._hooks,
            checkpoint_path=session.save(wait=True),
            name=self._name,
        )
