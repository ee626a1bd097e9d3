"""What a task says where its log directory is full: kept in the launcher's memory.

A task writes into a pipe what its log does not take, and the record of its exception.
"""

from __future__ import annotations

import contextlib
import os

from unisono.launcher._run_files import ErrorRecord, error_record

#: The most bytes that are kept of a task: its last ones.
_KEPT = 64 << 10
#: As in `_task`, which is a program of its own: what stands before the record of an exception.
_RECORD = b"\0"


class KeptOutput:
    """A pipe from a task, and the last of what came through it."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        # Neither end may hold up the other one.
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._bytes = b""
        self._is_open = True

    @property
    def descriptor(self) -> int:
        """The end for the task, until `given`."""
        return self._write

    def given(self) -> None:
        """Close the task's end in this process: the task has inherited it, or was not started."""
        os.close(self._write)

    def read(self) -> None:
        """Take what has come, without waiting."""
        while self._is_open:
            try:
                part = os.read(self._read, _KEPT)
            except BlockingIOError:
                return
            if not part:
                self.close()
            self._bytes = (self._bytes + part)[-_KEPT:]

    def close(self) -> None:
        """End the pipe; what has come stays."""
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(OSError):
                os.close(self._read)

    @property
    def error(self) -> ErrorRecord | None:
        """The task's record of its exception, where it could not write it; None without one."""
        _, mark, record = self._bytes.partition(_RECORD)
        return error_record(record) if mark else None

    def last_lines(self, count: int = 25) -> str:
        """Return the last lines that the log did not take."""
        text = self._bytes.partition(_RECORD)[0].decode(errors="replace")
        return "\n".join(text.splitlines()[-count:])
