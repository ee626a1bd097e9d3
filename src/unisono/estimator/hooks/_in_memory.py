"""Evaluation between the steps of training, in the same process.

Tests: tests/unit/estimator/test_hooks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unisono._errors import InvalidArgumentError
from unisono.estimator.hooks._hook import HookSession, SessionRunContext, SessionRunHook
from unisono.estimator.hooks._timer import IntervalHook

if TYPE_CHECKING:
    from unisono.estimator._estimator import Estimator


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
