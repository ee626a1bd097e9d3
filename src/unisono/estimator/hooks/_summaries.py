"""Summaries of a model_fn, and profiles, every so many steps or seconds.

Tests: tests/unit/estimator/test_hooks.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono.estimator._collections import RecordedSummary
from unisono.estimator.hooks._hook import HookSession, SessionRunArgs, SessionRunContext, SessionRunValues
from unisono.estimator.hooks._timer import IntervalHook
from unisono.summary import SummaryWriter, create_file_writer

_LOG = logging.getLogger("unisono")


def write_summaries(
    writer: SummaryWriter, summaries: Sequence[RecordedSummary], values: Mapping[str, Any], step: int
) -> None:
    """Write the summaries of a step."""
    for summary in summaries:
        data = np.asarray(values[summary.key]) if summary.key else summary.text
        writer.write(summary.kind, summary.tag, step, data, **summary.options)


class WritingHook(IntervalHook):
    """A hook that writes to an event file."""

    def __init__(
        self,
        every_secs: float | None,
        every_steps: int | None,
        output_dir: str | None,
        summary_writer: SummaryWriter | None,
    ) -> None:
        super().__init__(every_secs, every_steps)
        self._writer, self._output_dir = summary_writer, output_dir

    def begin(self) -> None:
        """Open the event file."""
        if self._writer is None and self._output_dir:
            self._writer = create_file_writer(self._output_dir)

    def end(self, session: HookSession) -> None:
        """Write the file."""
        if self._writer is not None:
            self._writer.flush()


class SummarySaverHook(WritingHook):
    """Write summaries of the model_fn at the first step, and every so many steps or seconds.

    Args:
        save_steps: the number of steps between two summaries.
        save_secs: the number of seconds between two summaries.
        output_dir: the directory of the event file.
        summary_writer: the writer, in place of one for `output_dir`.
        scaffold: any value; has no effect.
        summary_op: what functions of `tf.summary` returned in the model_fn, or a list of that; None for all
            summaries of the model_fn.

    Raises:
        InvalidArgumentError: both or none of steps and seconds are given.

    >>> hook = SummarySaverHook(save_steps=100, output_dir="/tmp/model")
    """

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | None = None,
        summary_writer: SummaryWriter | None = None,
        scaffold: object = None,
        summary_op: object = None,
    ) -> None:
        given = [summary_op] if isinstance(summary_op, RecordedSummary) else summary_op
        chosen = None if given is None else jax.tree.leaves(given)
        if chosen is not None and not all(isinstance(s, RecordedSummary) for s in chosen):
            raise InvalidArgumentError(
                "`summary_op` must be what `summary.scalar`, `summary.merge` or another function of "
                f"`unisono.estimator.summary` returned in the model_fn. Received: {summary_op!r}."
            )
        self._chosen: list[RecordedSummary] | None = chosen
        super().__init__(save_secs, save_steps, output_dir, summary_writer)
        self._is_due = False

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Ask for the data, where the last step of the group is to be written."""
        super().before_run(run_context)
        self._is_due = self._timer.should_trigger_for_step(self._step + run_context.steps)
        summaries = self._summaries(run_context.session)
        return SessionRunArgs([s.key for s in summaries if s.key]) if self._is_due else None

    def _act(self, run_context: SessionRunContext, step: int) -> None:
        if not self._is_due or self._writer is None:
            return
        self._timer.update_last_triggered_step(step)
        session = run_context.session
        write_summaries(self._writer, self._summaries(session), session.values, step)

    def _summaries(self, session: HookSession) -> list[RecordedSummary]:
        return session.summaries if self._chosen is None else self._chosen


class ProfilerHook(IntervalHook):
    """Write a profile of one step every so many steps or seconds, for TensorBoard's or Perfetto's viewer.

    Args:
        save_steps: the number of steps between two profiles.
        save_secs: the number of seconds between two profiles.
        output_dir: path of the directory.
        show_dataflow: bool; has no effect.
        show_memory: bool; has no effect.

    Raises:
        InvalidArgumentError: both or none of steps and seconds are given.

    >>> hook = ProfilerHook(save_steps=100, output_dir="/tmp/profile")
    """

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str = "",
        show_dataflow: bool = True,
        show_memory: bool = False,
    ) -> None:
        super().__init__(save_secs, save_steps)
        self._output_dir = output_dir or os.curdir
        self._is_running = False

    def steps_until_next(self, global_step: int) -> int:
        """Return the steps until the one of which a profile is made, or 1 for that one."""
        return max(1, super().steps_until_next(global_step) - 1)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Start the profiler."""
        super().before_run(run_context)
        if self._timer.last_triggered_step() is None:
            self._timer.update_last_triggered_step(self._step)
        elif run_context.steps == 1 and self._timer.should_trigger_for_step(self._step + 1):
            jax.profiler.start_trace(self._output_dir)
            self._is_running = True
        return None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Stop the profiler, when the step has run."""
        if self._is_running:
            jax.block_until_ready(dict(run_context.session.values))
            self._stop()
            self._timer.update_last_triggered_step(self._step + 1)

    def end(self, session: HookSession) -> None:
        """Stop the profiler."""
        self._stop()

    def _stop(self) -> None:
        if self._is_running:
            jax.profiler.stop_trace()
            self._is_running = False
            _LOG.info("Saving a profile of step %d into %s.", self._step + 1, self._output_dir)
