"""When a hook acts: every so many steps or seconds.

Tests: tests/unit/estimator/test_hooks.py.
"""

from __future__ import annotations

import time

from unisono._errors import InvalidArgumentError
from unisono.estimator.hooks._hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues

#: The most steps that run between two looks at the clock.
_MOST_STEPS = 100


class SecondOrStepTimer:
    """Triggers every so many seconds or steps.

    Args:
        every_secs: the seconds.
        every_steps: the steps; one of the two must be given.

    Raises:
        InvalidArgumentError: both are given, or none.

    >>> timer = SecondOrStepTimer(every_steps=10)
    >>> timer.update_last_triggered_step(5)
    (None, None)
    >>> timer.should_trigger_for_step(14), timer.should_trigger_for_step(15)
    (False, True)
    """

    def __init__(self, every_secs: float | None = None, every_steps: int | None = None) -> None:
        if (every_secs is None) == (every_steps is None):
            raise InvalidArgumentError(
                "Either seconds or steps must be given. Received: "
                f"every_secs={every_secs!r}, every_steps={every_steps!r}. Leave one of them out."
            )
        self._every_secs, self._every_steps = every_secs, every_steps
        self.reset()

    def reset(self) -> None:
        """Forget when it triggered."""
        self._step: int | None = None
        self._time: float | None = None

    def should_trigger_for_step(self, step: int) -> bool:
        """Return whether it is time to act at a step; always at the first one.

        Args:
            step: a number of steps.
        """
        if self._step is None or self._time is None:
            return True
        if step == self._step:
            return False
        if self._every_secs is not None:
            return time.monotonic() >= self._time + self._every_secs
        return step >= self._step + (self._every_steps or 0)

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        """Note that it has triggered.

        Args:
            step: at which.

        Returns:
            Seconds and steps since the time before; None, None for the first time.
        """
        now = time.monotonic()
        before, when = self._step, self._time
        self._step, self._time = step, now
        return (None, None) if before is None or when is None else (now - when, step - before)

    def last_triggered_step(self) -> int | None:
        """Return the step at which it last triggered, or None."""
        return self._step

    def _steps_until(self, step: int) -> int:
        """Return after how many more steps to ask again.

        Args:
            step: the number of steps so far.
        """
        if self._step is None or self._time is None:
            return 1
        if self._every_secs is None:
            return max(1, self._step + (self._every_steps or 0) - step)
        now = time.monotonic()
        remaining = self._time + self._every_secs - now
        if remaining <= 0 or step <= self._step:
            return 1
        # Half of what the pace so far allows, and no more steps than it was measured with: the first ones of
        # an interval may have been started without waiting for them.
        passed = step - self._step
        pace = (now - self._time) / passed
        return max(1, min(_MOST_STEPS, passed, int(remaining / max(pace, 1e-9) / 2)))


class IntervalHook(SessionRunHook):
    """A hook that acts every so many steps or seconds, when the last of them has run."""

    def __init__(self, every_secs: float | None, every_steps: int | None) -> None:
        self._timer = SecondOrStepTimer(every_secs, every_steps)
        #: The number of steps before the group that runs.
        self._step = 0

    def steps_until_next(self, global_step: int) -> int:
        """Return the steps until it acts."""
        return self._timer._steps_until(global_step)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Note the step."""
        self._step = run_context.session.global_step
        return None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Act if it is time."""
        step = self._step + run_context.steps
        # Asked again: data may end within a group.
        if self._timer.should_trigger_for_step(step):
            self._act(run_context, step)

    def _act(self, run_context: SessionRunContext, step: int) -> None:
        """Do what is due after a step, and tell the timer."""
        raise NotImplementedError


class NeverTriggerTimer:
    """Triggers never.

    >>> NeverTriggerTimer().should_trigger_for_step(1)
    False
    """

    def reset(self) -> None:
        """Do nothing."""

    def should_trigger_for_step(self, step: int) -> bool:
        """Return False."""
        return False

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        """Return None, None."""
        return None, None

    def last_triggered_step(self) -> int | None:
        """Return None."""
        return None

    def _steps_until(self, step: int) -> None:
        """Return None: any number of steps may run."""
