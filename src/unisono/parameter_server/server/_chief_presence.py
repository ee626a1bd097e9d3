"""How a task knows of its chief: heartbeats while the job runs, and a marker that it has ended.

Without heartbeats a task ends, and does not wait for ever. A task of this machine that is away when its chief
ends may just be starting: the chief leaves a file beside the task's socket. A process that was started before
the file was written belongs to the job that has ended; a later one belongs to the next. So the chief need not
wait for tasks that may never come.

Tests: tests/unit/parameter_server/test_chief_presence.py.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from unisono._checks import digits
from unisono._errors import ClusterError
from unisono._system._files import replace_file
from unisono._system._lease import ActiveClock, Lease
from unisono.cluster_resolver._spec import split_address
from unisono.rpc._calls import RequestClient, RequestNumbers
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.rpc._transport._local import is_loopback, socket_directory, socket_path

#: Seconds between two signs: little beside the shortest sensible limit, and no work worth speaking of.
HEARTBEAT_SECONDS = 5.0

#: Seconds after which a marker that no task has read is removed.
_KEPT = 3600.0


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


def leave_end_marker(addresses: Iterable[str], code: int) -> set[str]:
    """Mark for tasks that their job has ended; return the addresses for which that was possible."""
    left = set()
    for address in addresses:
        with contextlib.suppress(ClusterError, OSError):
            if (path := _path(address)) is not None:
                replace_file(path, f"{code & 0xFF}\n", durable=False)
                left.add(address)
                _sweep(path.parent)
    return left


def end_marker_of(address: str, since: float) -> int | None:
    """Return the exit code that was left for a task, None without a marker.

    Args:
        since: when its process was started, in seconds since the epoch: an older marker is of another job.
    """
    try:
        path = _path(address)
        if path is None or path.stat().st_mtime < since:
            return None
        text = path.read_text(errors="replace").strip()
        path.unlink(missing_ok=True)
    except (ClusterError, OSError):
        return None
    code = digits(text)
    return 1 if code is None or code > 255 else code


def _path(address: str) -> Path | None:
    if not is_loopback(split_address(address)[0]):
        return None
    path = socket_path(address, socket_directory())
    return path.with_name(f"{path.name}.ended")


def _sweep(directory: Path) -> None:
    for path in directory.glob("*.ended"):
        if path.stat().st_mtime < time.time() - _KEPT:
            path.unlink(missing_ok=True)
