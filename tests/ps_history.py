"""A checker of histories of updates: each one applied once, none staler than its bound."""

import collections
import dataclasses


class HistoryError(AssertionError):
    """An update that was lost, applied twice, or too stale."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that happened to a closure.

    Args:
        kind: `"schedule"`, `"pull"`, `"apply"` or `"acknowledge"`.
        closure: its number.
        server: which server has applied its update.
    """

    kind: str
    closure: int
    server: int = -1


def check_history(events, servers, max_staleness=None):
    """Return the largest staleness of a history.

    The staleness of an update is the number of other updates that a server applies between the closure's last
    pull and its own update there.

    Raises:
        HistoryError: when a closure was applied more or less than once on a server, or was too stale.
    """
    times = collections.Counter((e.closure, e.server) for e in events if e.kind == "apply")
    for closure in (e.closure for e in events if e.kind == "schedule"):
        for server in range(servers):
            if (count := times[closure, server]) != 1:
                raise HistoryError(f"closure {closure} was applied {count} times on server {server}")
    stalest = 0
    pulled_at, applied = {}, [0] * servers
    for event in events:
        if event.kind == "pull":
            pulled_at[event.closure] = list(applied)
        elif event.kind == "apply":
            others = applied[event.server] - pulled_at[event.closure][event.server]
            applied[event.server] += 1
            if max_staleness is not None and others > max_staleness:
                raise HistoryError(
                    f"closure {event.closure} missed {others} other updates on server {event.server}, and "
                    f"the bound is {max_staleness}"
                )
            stalest = max(stalest, others)
    return stalest
