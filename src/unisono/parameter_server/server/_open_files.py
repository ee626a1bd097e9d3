"""How many files a task may open: each connection of ZeroMQ takes several descriptors.

Tests: tests/unit/parameter_server/test_open_files.py.
"""

from __future__ import annotations

import contextlib
import sys

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
