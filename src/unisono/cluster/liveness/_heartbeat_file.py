"""The heartbeat file of a supervised process, and the end of a process that was replaced."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from pathlib import Path

from unisono._system._environ import process_environ
from unisono._system._task_reports import Heartbeat

_LOG = logging.getLogger("unisono")

#: Seconds between two heartbeats: writing a file in every step would cost more than a small step.
_PERIOD = 1.0


class HeartbeatFile(Heartbeat):
    """Writes `step wallclock` into the file that a supervisor watches, once a second at most.

    A process that was stopped and meanwhile replaced finds a later generation in the fence file when it
    resumes, and ends itself before it can write anything.

    Args:
        progress: the file to write; None to write none.
        fence: the file that holds the current generation; None where nothing replaces the process.
    """

    is_read = True

    def __init__(self, progress: Path | None, fence: Path | None, generation: str) -> None:
        self._progress, self._fence, self._generation = progress, fence, generation
        self._next_beat = 0.0
        self._warned = False
        self.steps = 0

    @classmethod
    def from_environ(cls) -> HeartbeatFile:
        """Return the heartbeat that the supervisor's variables describe."""
        environ = process_environ()
        names = ("UNISONO_PROGRESS", "UNISONO_FENCE")
        progress, fence = (Path(environ[n]) if environ.get(n) else None for n in names)
        return cls(progress, fence, environ.get("UNISONO_GENERATION", "0"))

    def beat(self) -> None:
        """Count a step, and write the heartbeat when it is due."""
        self.steps += 1
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + _PERIOD
        self._exit_if_replaced()
        if self._progress is not None:
            self._write(self._progress)

    def _write(self, progress: Path) -> None:
        """Write the heartbeat; training continues when it cannot be written."""
        try:
            progress.write_text(f"{self.steps} {time.time():.3f}\n")
        except OSError as error:
            with contextlib.suppress(OSError):
                # A full disk has no room for the text, but the supervisor also reads the file's time.
                os.utime(progress)
            if not self._warned:
                self._warned = True
                _LOG.warning(
                    "Training continues without writing its progress: %s (%s).", error.strerror, progress
                )

    def _exit_if_replaced(self) -> None:
        if self._fence is None:
            return
        try:
            current = self._fence.read_text(errors="replace").strip()
        except OSError:
            return
        if _is_later(current, self._generation):
            sys.stderr.write(
                f"This process is of generation {self._generation}, the cluster is at {current}: "
                "it was replaced, and ends.\n"
            )
            sys.stderr.flush()
            os._exit(1)


def _is_later(current: str, own: str) -> bool:
    """Whether the fence holds a later generation; on a full disk it may still hold an earlier one.

    >>> _is_later("2", "1"), _is_later("0", "1"), _is_later("", "1")
    (True, False, False)
    """
    if current.isdecimal() and own.isdecimal() and max(len(current), len(own)) < 19:
        return int(current) > int(own)
    return current not in ("", own)
