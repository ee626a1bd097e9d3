"""Kill the tasks of a launcher that died: a program in a session of its own, without Unisono.

Standard input is a pipe whose other end the launcher holds. A line `+123` adds a process group, `-123`
removes it; at the end of the input, the remaining groups get SIGKILL. The argument is the launch's mark.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path

#: Seconds after which `sweep` gives up on processes that start new ones faster than it kills them.
_SWEEP_LIMIT = 10.0


def remaining_groups(lines: Iterable[str]) -> set[int]:
    """Return the groups that were added and not removed.

    >>> remaining_groups(["+5", "+6", "-5"])
    {6}
    """
    groups: set[int] = set()
    for line in lines:
        number = int(line[1:])
        if line[0] == "+":
            groups.add(number)
        else:
            groups.discard(number)
    return groups


def find_marked(mark: str, processes: Path = Path("/proc")) -> set[int]:
    """Return the processes whose environment holds a mark; none where there is no `/proc`.

    Processes inherit the mark from a task, also daemons with a session of their own or another parent.
    """
    pids = set()
    for place in processes.glob("[0-9]*"):
        try:
            environment = (place / "environ").read_bytes()
        except OSError:  # the process has ended, or belongs to another user
            continue
        if mark.encode() in environment:
            pids.add(int(place.name))
    return pids


def sweep(mark: str, spared: Collection[int] = ()) -> set[int]:
    """Kill all marked processes, and those that they start meanwhile."""
    killed: set[int] = set()
    deadline = time.monotonic() + _SWEEP_LIMIT
    while left := find_marked(mark) - {*spared, os.getpid()}:
        killed |= left
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # the process has ended, or has changed its user
                continue
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return killed


def main() -> None:
    """Wait for the launcher's end, then kill what it left."""
    # Ctrl-C and a closed terminal reach the launcher and this process alike; this one must outlive the
    # launcher.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for group in remaining_groups(line.strip() for line in sys.stdin):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue
    sweep(sys.argv[1])


if __name__ == "__main__":
    main()
