"""How long steps and saves take, and when the last save must begin."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator


class StepTiming:
    """How long a step and a save take, so that the last save is begun in time.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None
        # The first step compiles, and says nothing of the others.
        self._steps: collections.deque[float] = collections.deque(maxlen=10)
        self._save = 0.0

    def step_ended(self) -> None:
        """A step has ended, and the next begins."""
        now = self._clock()
        if self._since is not None:
            self._steps.append(now - self._since)
        self._since = now

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Around a save."""
        began = self._clock()
        yield
        self._since = self._clock()
        self._save = max(self._save, self._since - began)

    def needed(self) -> float:
        """Seconds to agree in one step, to end it and to save; twice, as disks have bad moments."""
        return 2 * (2 * max(self._steps, default=0.0) + self._save)


def wants_save(now: float, noticed_at: float | None, *, saved: bool, grace: float, needed: float) -> bool:
    """Whether a process wants to save. Pure.

    Args:
        now: seconds of a clock.
        noticed_at: when word of the end came, None if it has not.
        saved: whether it has been saved since then.
        grace: seconds from the word to the end.
        needed: seconds that a save must begin before the end.

    >>> wants_save(50.0, 40.0, saved=True, grace=30.0, needed=4.0)
    False
    """
    if noticed_at is None:
        return False
    return not saved or now >= noticed_at + grace - needed
