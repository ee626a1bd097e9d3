"""How long steps and saves take, and when the last save must begin."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator


class StepTiming:
    """How long a step and a save take, so that the last save starts in time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None
        # Without the first step, which compiles and takes much longer than the others.
        self._steps: collections.deque[float] = collections.deque(maxlen=10)
        self._save = 0.0

    def step_ended(self) -> None:
        """Note that a step has ended and the next one begins."""
        now = self._clock()
        if self._since is not None:
            self._steps.append(now - self._since)
        self._since = now

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Measure a save; the time does not count as a step."""
        began = self._clock()
        yield
        self._since = self._clock()
        self._save = max(self._save, self._since - began)

    def needed(self) -> float:
        """Return the seconds for a step in which the workers agree, the step after it, and a save.

        Twice the longest that was measured: a shared disk is at times much slower than usual.
        """
        return 2 * (2 * max(self._steps, default=0.0) + self._save)


def wants_save(now: float, noticed_at: float | None, *, saved: bool, grace: float, needed: float) -> bool:
    """Return whether a process should save. Pure.

    Args:
        noticed_at: when the notice of the end arrived, None before.
        saved: whether it has been saved since then.
        grace: seconds from the notice to the end.
        needed: seconds that a save must begin before the end.

    >>> wants_save(50.0, 40.0, saved=True, grace=30.0, needed=4.0)
    False
    """
    if noticed_at is None:
        return False
    return not saved or now >= noticed_at + grace - needed
