"""The chief's heartbeats to all tasks that serve it: without them a task ends, and does not wait for ever.

Tests: tests/unit/parameter_server/test_heartbeats.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from unisono._errors import ClusterError
from unisono._system._lease import ActiveClock, Lease
from unisono.rpc._calls import RequestClient, RequestNumbers
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op

#: Seconds between two signs: little beside the shortest sensible limit, and no work worth speaking of.
HEARTBEAT_SECONDS = 5.0


def chief_lease() -> Lease:
    """Return the lease of a chief on a task, which its heartbeats renew."""
    # Tasks look at it at least every two seconds.
    return Lease(ActiveClock(gap=4.0).now)


class ChiefHeartbeats:
    """Sends HEARTBEAT to all tasks, from a thread.

    Args:
        every: seconds between two heartbeats.
    """

    def __init__(
        self, clients: Sequence[RequestClient], generation: int, every: float = HEARTBEAT_SECONDS
    ) -> None:
        self._clients, self._generation, self._every = list(clients), generation, every
        self._numbers = RequestNumbers()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unisono-chief-heartbeats", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(self._every):
            for client in self._clients:
                frame = Frame(Op.HEARTBEAT, self._numbers.next(), self._generation)
                # A task that is away gets a later one; requests that wait for it report it.
                with contextlib.suppress(ClusterError):
                    client.send(frame, timeout=self._every)

    def close(self) -> None:
        """End the thread; the clients stay open."""
        self._closed.set()
