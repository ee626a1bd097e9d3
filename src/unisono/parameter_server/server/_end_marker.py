"""The end of a job, for a task of this machine that is away when its chief ends: it may just be starting.

The chief leaves a file beside the task's socket. A process that was started before the file was written
belongs to the job that has ended; a later one belongs to the next. So the chief need not wait for tasks that
may never come.

Tests: tests/unit/parameter_server/test_end_marker.py.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from unisono._checks import digits
from unisono._errors import ClusterError
from unisono._system._files import replace_file
from unisono.cluster_resolver._spec import split_address
from unisono.rpc._transport._local import is_loopback, socket_directory, socket_path

#: Seconds after which a marker that no task has read is removed.
_KEPT = 3600.0


def leave_end_marker(addresses: Iterable[str], code: int) -> set[str]:
    """Mark for tasks that their job has ended; return the addresses for which that was possible.

    Args:
        code: the exit code for them.
    """
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


def started_at() -> float:
    """Return when this process was started, in seconds since the epoch; now, where that is not known."""
    if sys.platform != "linux":
        return time.time()
    # The 22nd field, in ticks since the system was started. The second one may hold spaces.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks)


def _path(address: str) -> Path | None:
    if not is_loopback(split_address(address)[0]):
        return None
    path = socket_path(address, socket_directory())
    return path.with_name(f"{path.name}.ended")


def _sweep(directory: Path) -> None:
    for path in directory.glob("*.ended"):
        if path.stat().st_mtime < time.time() - _KEPT:
            path.unlink(missing_ok=True)
