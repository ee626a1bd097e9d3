"""Hooks that look at values: log lines, steps per second, a loss that is not a number.

Tests: tests/unit/estimator/test_hooks.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from unisono._errors import InvalidArgumentError, UnisonoError
from unisono.estimator._collections import fetch_in_all_runs
from unisono.estimator.hooks._hook import (
    GLOBAL_STEP,
    HookSession,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from unisono.estimator.hooks._summaries import WritingHook
from unisono.estimator.hooks._timer import NeverTriggerTimer, SecondOrStepTimer
from unisono.summary import SummaryWriter

_LOG = logging.getLogger("unisono")


class NanLossDuringTrainingError(UnisonoError, RuntimeError):
    """The loss was not a number."""

    def __str__(self) -> str:
        """Return TensorFlow's message."""
        return super().__str__() or "NaN loss during training."


class LoggingTensorHook(SessionRunHook):
    """Log values every so many steps or seconds, or at the end.

    Made in a model_fn, it takes any arrays that are computed there.

    Args:
        tensors: values of the model_fn by the names to log; or a list of names of such values.
        every_n_iter: the number of steps between two lines.
        every_n_secs: the number of seconds between two lines.
        at_end: whether to log at the end of the loop.
        formatter: returns a line for the mapping of names to values.

    Raises:
        InvalidArgumentError: neither steps nor seconds nor the end are given; or steps and seconds are.

    >>> hook = LoggingTensorHook(["loss"], every_n_iter=10)
    """

    def __init__(
        self,
        tensors: Mapping[str, Any] | Sequence[Any],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[Mapping[str, Any]], str] | None = None,
    ) -> None:
        only_at_end = at_end and every_n_iter is None and every_n_secs is None
        if not only_at_end and (every_n_iter is None) == (every_n_secs is None):
            raise InvalidArgumentError(
                "`every_n_iter` or `every_n_secs` must be given, or `at_end` alone. Received: "
                f"every_n_iter={every_n_iter!r}, every_n_secs={every_n_secs!r}, at_end={at_end!r}."
            )
        if every_n_iter is not None and every_n_iter <= 0:
            raise InvalidArgumentError(f"`every_n_iter` must be positive. Received: {every_n_iter!r}.")
        self._formatter, self._at_end = formatter, at_end
        self._fetches = _named(tensors)
        self._timer: SecondOrStepTimer | NeverTriggerTimer = (
            NeverTriggerTimer() if only_at_end else SecondOrStepTimer(every_n_secs, every_n_iter)
        )
        self._counts = every_n_iter is not None
        self._count = 0
        self._is_due = False

    def begin(self) -> None:
        """Count from zero."""
        self._timer.reset()
        self._count = 0

    def steps_until_next(self, global_step: int) -> int | None:
        """Return the steps until the next line."""
        left = self._timer._steps_until(self._count)
        # The timer is asked with the number of steps before the one to log: one more has run then.
        return left + 1 if left is not None and left > 1 and self._counts else left

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Ask for the values, where the last step of the group is to be logged."""
        self._is_due = self._timer.should_trigger_for_step(self._count + run_context.steps - 1)
        return SessionRunArgs(self._fetches) if self._is_due or self._at_end else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Log the values."""
        count = self._count + run_context.steps - 1
        # Data may end within a group.
        if self._is_due and self._timer.should_trigger_for_step(count):
            self._log(run_values.results, count)
        self._count += run_context.steps

    def end(self, session: HookSession) -> None:
        """Log the values of the last step, if `at_end`."""
        if self._at_end and self._count:
            self._log(session.run(self._fetches), self._count)

    def _log(self, values: Mapping[str, Any], count: int) -> None:
        seconds, _ = self._timer.update_last_triggered_step(count)
        if self._formatter is not None:
            _LOG.info("%s", self._formatter(values))
            return
        with np.printoptions(suppress=True):
            line = ", ".join(f"{name} = {value}" for name, value in values.items())
        _LOG.info("%s", line if seconds is None else f"{line} ({seconds:.3f} sec)")


def _named(tensors: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    """Return the tensors by their names in the log, in its order."""
    if isinstance(tensors, Mapping):
        return {tag: fetch_in_all_runs(tensors[tag], "logged") for tag in sorted(tensors)}
    fetches = [fetch_in_all_runs(tensor, "logged") for tensor in tensors]
    return {fetch if isinstance(fetch, str) else repr(fetch): fetch for fetch in fetches}


class StepCounterHook(WritingHook):
    """Log and record how many steps run in a second.

    Args:
        every_n_steps: the number of steps between two records.
        every_n_secs: the number of seconds between two records; then `every_n_steps` is None.
        output_dir: the directory of the event file; None for log lines alone.
        summary_writer: the writer, in place of one for `output_dir`.

    Raises:
        InvalidArgumentError: both or none of steps and seconds are given.

    >>> hook = StepCounterHook(every_n_steps=10)
    """

    def __init__(
        self,
        every_n_steps: int | None = 100,
        every_n_secs: float | None = None,
        output_dir: str | None = None,
        summary_writer: SummaryWriter | None = None,
    ) -> None:
        super().__init__(every_n_secs, every_n_steps, output_dir, summary_writer)

    def _act(self, run_context: SessionRunContext, step: int) -> None:
        seconds, steps = self._timer.update_last_triggered_step(step)
        if seconds is None or steps is None:
            return
        pace = steps / max(seconds, 1e-9)
        _LOG.info("%s/sec: %g", GLOBAL_STEP, pace)
        if self._writer is not None:
            self._writer.write("scalar", f"{GLOBAL_STEP}/sec", step, np.float32(pace))


class NanTensorHook(SessionRunHook):
    """Stop where the loss is not a number.

    It is looked at whenever another hook looks at a step, and after 100 steps at the latest.

    Args:
        loss_tensor: the loss of the model_fn, or its name.
        fail_on_nan_loss: whether to raise an error; otherwise the loop ends.

    Raises:
        NanLossDuringTrainingError: in `after_run`.

    >>> hook = NanTensorHook("loss")
    """

    def __init__(self, loss_tensor: Any, fail_on_nan_loss: bool = True) -> None:
        self._loss = fetch_in_all_runs(loss_tensor, "loss")
        self._fails = fail_on_nan_loss

    def steps_until_next(self, global_step: int) -> None:
        """Return None: it looks when others do."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        """Ask for the loss."""
        return SessionRunArgs(self._loss)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Look at it."""
        if not np.isnan(run_values.results).any():
            return
        message = "Model diverged with loss = NaN."
        if self._fails:
            _LOG.error(message)
            raise NanLossDuringTrainingError
        _LOG.warning(message)
        run_context.request_stop()
