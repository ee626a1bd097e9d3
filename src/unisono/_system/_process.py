"""Limits and facts of this process: its open files, the turns of a thread, when it was started."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

#: More than any cluster needs. Python closes descriptors up to the limit one by one on systems without a list
#: of the open ones, and some systems have no limit.
_MOST = 1 << 16


def allow_open_files() -> int:
    """Raise this process's limit of open files as far as the system lets it; return the limit.

    Many systems allow 1024 unless a process asks for more. Where a server has none left, libzmq 4.3.5 ends
    the process when the next client connects, by an assertion: "Too many open files (src/ipc_listener.cpp)".

    >>> allow_open_files() > 0
    True
    """
    if sys.platform == "win32":
        return _MOST
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MOST if soft == resource.RLIM_INFINITY else soft
    # macOS has a second limit, which it does not name.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def let_others_finish() -> bool:
    """Let the present thread wait, when it is woken, until a processor is free; return whether it will.

    An answer wakes the worker while its server still sends, with the next push of another worker waiting.
    Linux may run the worker at once, on the server's processor: a server's `send` took 0.3 ms under a
    profiler, and a step has 9.2 switches of threads instead of 10.7 (2 workers, 2 cores, 2026-11-22). Both
    have the same share of the processors as before. A thread whose policy someone has chosen keeps that.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return False
    # A sandbox may refuse both calls.
    with contextlib.suppress(OSError):
        # 0 is the present thread; those that it starts have the same policy.
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return False
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return True
    return False


def started_at() -> float:
    """Return when this process was started, in seconds since the epoch; now, where that is not known."""
    if sys.platform != "linux":
        return time.time()
    # The 22nd field, in ticks since the system was started. The second one may hold spaces.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks)
