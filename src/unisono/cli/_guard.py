"""Ends the tasks of a launcher that died; runs by itself, in its own session, without Unisono.

Standard input is a pipe whose other end the launcher holds. A line `+123` adds a process group, `-123`
takes it out; at the end of the input, those that are left get SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable


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


def main() -> None:
    """Wait for the launcher's end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for group in groups_left(line.strip() for line in sys.stdin):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
