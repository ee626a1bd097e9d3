"""Ends the tasks of a launcher that died; runs by itself, in its own session, without Unisono.

Standard input is a pipe whose other end the launcher holds. A line `+123` adds a process group, `-123`
takes it out; at the end of the input, those that are left get SIGKILL. The argument is the launch's mark.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path

#: How long processes that start new ones are hunted, in seconds.
_HUNT = 10.0


def groups_left(lines: Iterable[str]) -> set[int]:
    """Return the groups that were added and not taken out.

    >>> groups_left(["+5", "+6", "-5"])
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


def marked(mark: str, processes: Path = Path("/proc")) -> set[int]:
    """Return the processes whose environment holds a mark; none where `/proc` does not say.

    It was inherited from a task, also by those that have a session of their own, or another parent.

    Args:
        mark: a text that is in no other environment.
        processes: where the system describes them.
    """
    found = set()
    for place in processes.glob("[0-9]*"):
        try:
            environment = (place / "environ").read_bytes()
        except OSError:  # it has ended, or is another user's
            continue
        if mark.encode() in environment:
            found.add(int(place.name))
    return found


def sweep(mark: str, spared: Collection[int] = ()) -> set[int]:
    """Kill all marked processes, and those that they start meanwhile.

    Args:
        mark: as in `marked`.
        spared: numbers of processes that stay.

    Returns:
        The processes that were there.
    """
    found: set[int] = set()
    deadline = time.monotonic() + _HUNT
    while left := marked(mark) - {*spared, os.getpid()}:
        found |= left
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # it has ended, or has become another user's
                continue
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return found


def main() -> None:
    """Wait for the launcher's end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for group in groups_left(line.strip() for line in sys.stdin):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue
    sweep(sys.argv[1])


if __name__ == "__main__":
    main()
