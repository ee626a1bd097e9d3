"""A thread that checks the peers while this process is blocked, waiting for them.

When a process ends, the kernel closes its connections and the collectives of its peers on CPUs fail at once.
When a machine disappears, nothing is closed: its peers would be blocked until a collective times out, which
takes minutes, because a peer may be compiling. And on GPUs of one machine NCCL has no connections that would
be closed. So a process that has been blocked for a while asks its peers.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from unisono.cluster.liveness._peer_monitor import PeerMonitor
from unisono.cluster.liveness._status import InFlight
from unisono.cluster.liveness._status_server import AbsentError, EndedError, UnreachableError

_LOG = logging.getLogger("unisono")

#: Periods for which a machine must be unreachable until it counts as lost: a network may have a short outage.
_PERIODS = 3
#: Seconds between two looks at this process' own state, at most; nothing is sent for it.
_TICK = 1.0
#: Seconds for a collective to fail by itself after an abort, since its error shows where the program was.
_GRACE = 5.0


class PeerWatchdog:
    """Checks the peers when this process makes no progress, and ends it when a peer's machine is lost.

    The main thread cannot be interrupted: it is blocked in a collective, in C++.

    Args:
        period: seconds without progress before the peers are asked, and between two checks.
        end: called with the reason when this process must end.
    """

    def __init__(
        self, monitor: PeerMonitor, in_flight: InFlight, period: float, end: Callable[[str], None]
    ) -> None:
        self._monitor, self._in_flight, self._period, self._end = monitor, in_flight, period, end
        self._unreachable_since: dict[int, float] = {}
        self._logged: set[int] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unisono-peer-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop checking."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        blocked_on: int | None = None
        last_check = time.monotonic()
        aborted_since: float | None = None
        while not self._closed.wait(min(_TICK, self._period)):
            oldest, now = self._in_flight.oldest, time.monotonic()
            if oldest is None or oldest != blocked_on:
                blocked_on, last_check, aborted_since = oldest, now, None
                self._unreachable_since.clear()
                self._logged.clear()
                continue
            if self._monitor.is_aborted:
                aborted_since = now if aborted_since is None else aborted_since
                if now - aborted_since >= min(_GRACE, self._period):
                    self._end(self._monitor.status.abort_reason)
                    return
            elif now - last_check >= self._period:
                if lost := self._find_lost():
                    self._monitor.broadcast_lost(lost)
                    self._end(self._monitor.status.abort_reason)
                    return
                last_check = time.monotonic()

    def _find_lost(self) -> dict[int, AbsentError]:
        """The peers whose machines have been unreachable for long enough."""
        began = time.monotonic()
        absent = self._monitor.find_absent()
        ended: dict[int, AbsentError] = {p: e for p, e in absent.items() if isinstance(e, EndedError)}
        unreachable = {p: error for p, error in absent.items() if isinstance(error, UnreachableError)}
        self._unreachable_since = {p: self._unreachable_since.get(p, began) for p in unreachable}
        if ended and not self._monitor.status.sees_ends:
            # A machine that was unreachable at an earlier check is the cause: others ended because of it.
            earlier = {p: error for p, error in unreachable.items() if self._unreachable_since[p] < began}
            return {**earlier, **ended}
        for process in sorted(absent.keys() - self._logged):
            _LOG.warning("Waiting for %s: %s.", self._monitor.name_of(process), absent[process])
        self._logged |= absent.keys()
        limit = _PERIODS * self._period
        return {
            p: error
            for p, error in unreachable.items()
            if time.monotonic() - self._unreachable_since[p] >= limit
        }


def end_process(reason: str = "") -> None:
    """End this process with code 1, without exit handlers.

    JAX's handler would wait for the peers at a barrier, and abort the process in C++ when one never arrives.
    """
    if reason:
        sys.stderr.write(f"This process ends with code 1. {reason}\n")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
