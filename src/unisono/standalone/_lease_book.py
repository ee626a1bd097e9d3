"""Which client a server trains for, and until when; pure."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from unisono._errors import ClusterError, ContextError
from unisono._system._lease import Lease
from unisono.standalone._protocol import LEASE_GRACE


class ServerBusyError(ClusterError):
    """A server trains for another client."""


@dataclasses.dataclass
class ClientLease:
    """The right of a client to a server.

    Args:
        ends: whether the job is being ended; no request is answered any more.
    """

    job: str
    client: str
    lease: Lease
    ends: bool = False

    @property
    def is_over(self) -> bool:
        """True if the client has been silent for too long."""
        return not self.ends and self.lease.is_over


class LeaseBook:
    """The lease of a server: one client at a time."""

    def __init__(self, name: str, now: Callable[[], float]) -> None:
        self._name, self._now = name, now
        self.held: ClientLease | None = None
        # Jobs that have ended: a repeated HELLO of one must not take the server again.
        self._ended: collections.deque[str] = collections.deque(maxlen=1000)

    def claim(self, job: str, client: str, seconds: float) -> bool:
        """Give the server to a job, or renew its lease; return whether it is new here.

        Raises:
            ContextError: when the job has ended.
        """
        if job in self._ended:
            raise ContextError("A job must not begin again after its END. Start another one.")
        held = self.held
        if held is None:
            self.held = ClientLease(job, client, Lease(self._now, seconds))
            return True
        if held.job == job and not held.ends:
            held.lease.renew()
            return False
        doing = "and is being ended" if held.ends else f"and was last seen {held.lease.silence:.1f} s ago"
        raise ServerBusyError(
            f"A server trains for one client at a time. Received: a second client at {self._name}, which "
            f"trains for {held.client} since {held.lease.age:.0f} s {doing}. Wait until it has ended, for "
            "example with `wait=600`; when a client dies, its lease ends within "
            f"{held.lease.seconds + LEASE_GRACE:g} s."
        )

    def check(self, job: str) -> None:
        """Renew the lease of the job that asks."""
        held = self.held
        if held is None or held.job != job or held.ends:
            raise ContextError(
                f"The server {self._name} must work for the job that asks. Received: a request of a job that "
                "it does not run: the server was started again, or the client was silent for too long."
            )
        held.lease.renew()

    def begin_to_end(self) -> None:
        """Answer no more requests of the job."""
        if self.held is not None:
            self.held.ends = True

    def end(self, for_good: bool) -> None:
        """Let another client have the server."""
        if self.held is not None and for_good:
            self._ended.append(self.held.job)
        self.held = None
