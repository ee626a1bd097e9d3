"""Which client a server trains for, and until when; pure.

Tests: tests/unit/standalone/test_lease.py.
"""

from __future__ import annotations

import collections
import dataclasses

from unisono._errors import ClusterError, ContextError
from unisono.standalone._protocol import LEASE_GRACE


class ServerBusyError(ClusterError):
    """A server trains for another client."""


@dataclasses.dataclass(frozen=True)
class ClientLease:
    """The right of a client to a server.

    Args:
        job: its random text.
        client: how the client describes itself.
        seconds: without a request, after which the right ends.
        since: when it began, in seconds of the monotonic clock.
        renewed: when the client has sent its last request.
        ends: whether the job is being ended; no request is answered any more.
    """

    job: str
    client: str
    seconds: float
    since: float
    renewed: float
    ends: bool = False

    def is_over(self, now: float) -> bool:
        """Return whether the client has been silent for too long."""
        return not self.ends and now - self.renewed > self.seconds


class LeaseBook:
    """The lease of a server: one client at a time.

    Args:
        name: the server's address, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.lease: ClientLease | None = None
        # Jobs that have ended: a repeated HELLO of one must not take the server again.
        self._ended: collections.deque[str] = collections.deque(maxlen=1000)

    def claim(self, job: str, client: str, seconds: float, now: float) -> bool:
        """Give the server to a job, or renew its lease; return whether it is new here.

        Args:
            job: the job.
            client: how its client describes itself.
            seconds: the length of the lease.
            now: in seconds of the monotonic clock.

        Raises:
            ServerBusyError: when another client has it, or the job is being ended.
            ContextError: when the job has ended.
        """
        if job in self._ended:
            raise ContextError("A job must not begin again after its END. Start another one.")
        held = self.lease
        if held is None:
            self.lease = ClientLease(job, client, seconds, now, now)
            return True
        if held.job == job and not held.ends:
            self.lease = dataclasses.replace(held, renewed=now)
            return False
        doing = "and is being ended" if held.ends else f"and was last seen {now - held.renewed:.1f} s ago"
        raise ServerBusyError(
            f"A server trains for one client at a time. Received: a second client at {self._name}, which "
            f"trains for {held.client} since {now - held.since:.0f} s {doing}. Wait until it has ended, for "
            "example with `wait=600`; when a client dies, its lease ends within "
            f"{held.seconds + LEASE_GRACE:g} s."
        )

    def check(self, job: str, now: float) -> None:
        """Renew the lease of the job that asks.

        Args:
            job: the job.
            now: in seconds of the monotonic clock.

        Raises:
            ContextError: when it has no lease, such as after the server was started again.
        """
        held = self.lease
        if held is None or held.job != job or held.ends:
            raise ContextError(
                f"The server {self._name} must work for the job that asks. Received: a request of a job that "
                "it does not run: the server was started again, or the client was silent for too long."
            )
        self.lease = dataclasses.replace(held, renewed=now)

    def begin_to_end(self) -> None:
        """Answer no more requests of the job."""
        if self.lease is not None:
            self.lease = dataclasses.replace(self.lease, ends=True)

    def end(self, for_good: bool) -> None:
        """Let another client have the server.

        Args:
            for_good: whether the client has ended the job; else it may take the server again for it.
        """
        if self.lease is not None and for_good:
            self._ended.append(self.lease.job)
        self.lease = None
