"""A thread that looks out for the others while this process waits for them.

A process that ends closes its connections, and the others hear of it at once. A machine that
disappears does not: the others would wait in a collective until its limit, which is long, because
somebody may be compiling. So who has waited for a while asks the others, whether they are there.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from unisono.cluster.liveness._in_flight import InFlight
from unisono.cluster.liveness._peer_monitor import PeerMonitor
from unisono.cluster.liveness._status_server import AbsentError, UnreachableError

_LOG = logging.getLogger("unisono")

#: A machine that could not be reached for so many periods is gone.
_PERIODS = 3
#: Seconds between two looks at what this process itself knows, at most.
_TICK = 1.0
#: Seconds in which a collective fails by itself, after it is known that all must end.
_GRACE = 5.0


class PeerWatchdog:
    """Asks the others when nothing goes on; ends this process when one of their machines is gone.

    The main thread cannot be woken: it waits inside a collective.

    Args:
        attendance: this process among the others.
        pending: what it waits for.
        seconds: for which nothing goes on before the others are asked, and between two questions.
        end: is told why this process must end.
    """

    def __init__(
        self, attendance: PeerMonitor, pending: InFlight, seconds: float, end: Callable[[str], None]
    ) -> None:
        self._attendance, self._pending, self._seconds, self._end = attendance, pending, seconds, end
        self._silent_since: dict[int, float] = {}
        self._named: set[int] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="unisono-lookout", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        self._thread.join()

    def _look(self) -> None:
        waited_for: int | None = None
        asked = time.monotonic()
        broken_since: float | None = None
        while not self._closed.wait(min(_TICK, self._seconds)):
            waits_for, now = self._pending.waits_for, time.monotonic()
            if waits_for is None or waits_for != waited_for:
                waited_for, asked, broken_since = waits_for, now, None
                self._silent_since.clear()
                self._named.clear()
                continue
            if self._attendance.is_broken:
                broken_since = now if broken_since is None else broken_since
                # Time enough for the error of the collective.
                if now - broken_since >= min(_GRACE, self._seconds):
                    self._end(self._attendance.record.word)
                    return
            elif now - asked >= self._seconds:
                if lost := self._lost():
                    self._attendance.lost(lost)
                    self._end(self._attendance.record.word)
                    return
                asked = time.monotonic()

    def _lost(self) -> dict[int, AbsentError]:
        """Whose machine is gone."""
        began = time.monotonic()
        absent = self._attendance.absent()
        silent = {p: error for p, error in absent.items() if isinstance(error, UnreachableError)}
        self._silent_since = {p: self._silent_since.get(p, began) for p in silent}
        for process in sorted(absent.keys() - self._named):
            _LOG.warning("Waiting for %s: %s.", self._attendance.name(process), absent[process])
        self._named |= absent.keys()
        limit = _PERIODS * self._seconds
        return {p: e for p, e in silent.items() if time.monotonic() - self._silent_since[p] >= limit}


def end_process(word: str = "") -> None:
    """End this process with code 1, at once: JAX would wait for the others, and perhaps end it in C++.

    Args:
        word: why; nothing is said where it was said before.
    """
    if word:
        sys.stderr.write(f"This process ends with code 1. {word}\n")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
