"""Signs of life for a supervisor: the last step in a file, and an end for processes that were replaced."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from pathlib import Path

from unisono.cluster_resolver._base import process_environ

_LOG = logging.getLogger("unisono")

#: Seconds between two signs.
_PERIOD = 1.0


class Heartbeat:
    """Writes `step wallclock` into the file that a supervisor watches, once a second at most.

    A process that was stopped and replaced meanwhile finds another generation in the fence file
    when it goes on, and ends itself before it can write anything.

    Args:
        progress: the file to write; None for no supervisor.
        fence: the file that holds the current generation; None for none.
        generation: this process' generation.
    """

    def __init__(self, progress: Path | None, fence: Path | None, generation: str) -> None:
        self._progress, self._fence, self._generation = progress, fence, generation
        self._next = 0.0
        self._warned = False
        self.steps = 0

    @classmethod
    def from_environ(cls) -> Heartbeat:
        """The one that the supervisor's variables describe."""
        environ = process_environ()
        names = ("UNISONO_PROGRESS", "UNISONO_FENCE")
        progress, fence = (Path(environ[n]) if environ.get(n) else None for n in names)
        return cls(progress, fence, environ.get("UNISONO_GENERATION", "0"))

    def beat(self) -> None:
        """Note a step."""
        self.steps += 1
        if self._progress is None and self._fence is None:
            return
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PERIOD
        self._end_if_replaced()
        if self._progress is not None:
            self._show(self._progress)

    def _show(self, progress: Path) -> None:
        """Write the sign; training goes on where it cannot be written."""
        try:
            progress.write_text(f"{self.steps} {time.time():.3f}\n")
        except OSError as error:
            with contextlib.suppress(OSError):
                # A full disk has room for a file's time, by which the supervisor sees that steps go on.
                os.utime(progress)
            if not self._warned:
                self._warned = True
                _LOG.warning(
                    "Training goes on without writing its progress: %s (%s).", error.strerror, progress
                )

    def _end_if_replaced(self) -> None:
        if self._fence is None:
            return
        try:
            current = self._fence.read_text(errors="replace").strip()
        except OSError:
            return
        if _is_later(current, self._generation):
            sys.stderr.write(
                f"This process is of generation {self._generation}, the cluster is at {current}: it ends.\n"
            )
            sys.stderr.flush()
            os._exit(1)


def _is_later(current: str, own: str) -> bool:
    """Whether the fence holds a generation after this one; it keeps an earlier one while the disk is full.

    >>> _is_later("2", "1"), _is_later("0", "1"), _is_later("", "1")
    (True, False, False)
    """
    if current.isdecimal() and own.isdecimal() and len(current) < 19:
        return int(current) > int(own)
    return current not in ("", own)
