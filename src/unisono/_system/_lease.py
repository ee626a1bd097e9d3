"""A right that ends unless it is renewed: a client's to a server, or a chief's to its tasks."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable


class ActiveClock:
    """A clock that pauses while this process is stopped or the machine sleeps.

    During that time this process has received nothing, and must not conclude that nothing was sent. It may
    be read by several threads.

    Args:
        gap: the most seconds that count between two readings: about four times the reader's interval, for a
            busy machine.
    """

    def __init__(self, gap: float = 2.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._gap, self._clock = gap, clock
        self._lock = threading.Lock()
        self._active = 0.0
        self._last = clock()

    def now(self) -> float:
        """Return the active seconds so far."""
        with self._lock:
            now = self._clock()
            self._active += min(now - self._last, self._gap)
            self._last = now
            return self._active


class Lease:
    """A right that ends unless it is renewed; safe to use from several threads.

    Args:
        now: returns the active time, as `ActiveClock.now` does.
        seconds: without a renewal, after which the right is over.
    """

    def __init__(self, now: Callable[[], float], seconds: float = math.inf) -> None:
        self._now, self.seconds = now, seconds
        self._began_at = self._renewed_at = now()

    def renew(self) -> None:
        """Note a sign of the one who has the right."""
        self._renewed_at = self._now()

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return self._now() - self._began_at

    @property
    def silence(self) -> float:
        """Seconds since it was renewed."""
        return self._now() - self._renewed_at

    @property
    def was_renewed(self) -> bool:
        """True if the one who has the right has given a sign."""
        return self._renewed_at > self._began_at

    @property
    def is_over(self) -> bool:
        """True if it was not renewed in time."""
        return self.silence > self.seconds
