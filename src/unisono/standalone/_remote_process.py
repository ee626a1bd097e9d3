"""A process on a server, as the client's supervisor sees it: its files are copied to the client's directory.

Tests: tests/unit/standalone/test_agent.py, tests/cluster/test_standalone.py.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono._system._files import replace_file
from unisono.cluster_resolver._spec import Task
from unisono.launcher._run_files import error_record

if TYPE_CHECKING:
    from unisono.standalone._link import ServerLink

_KILLED = 128 + signal.SIGKILL


@dataclasses.dataclass(frozen=True)
class LocalCopies:
    """Where the files of a process are copied to."""

    log: Path
    error: Path
    progress: Path
    result: Path


class RemoteProcess:
    """A process of a task on a server."""

    def __init__(
        self, key: str, task: Task, host: ServerLink, copies: LocalCopies, wake: Callable[[], None]
    ) -> None:
        self.pid, self.warm, self.loss, self.kept = 0, False, "", None
        self.ended_at: float | None = None
        self.key, self.task, self.copies = key, task, copies
        #: Bytes of its output that were copied, and the version of the rest.
        self.offset, self.version = 0, ""
        self._host, self._wake = host, wake
        self._code: int | None = None

    def assign(self, job: Mapping[str, Any]) -> bool:
        """Start it on the server; return False where that is not possible."""
        problem = self._host.start_process(self, job)
        if problem:
            self.lose(problem, time.time())
        return not problem

    def poll(self) -> int | None:
        """Return the exit code as a shell sees it, None while the process runs."""
        return self._code

    def send(self, number: int) -> None:
        """Send a signal to the process, not to its children."""
        if self._code is None:
            self._host.signal_process(self.key, number)

    def kill(self) -> None:
        """Kill the process and its children."""
        self.send(signal.SIGKILL)

    def add_output(self, data: bytes) -> None:
        """Append to the log."""
        with self.copies.log.open("ab") as file:
            file.write(data)

    def note_step(self, line: str) -> None:
        """Write the last step where it has changed: the file's time is the sign of progress."""
        text = f"{line}\n"
        path = self.copies.progress
        if line and (not path.exists() or path.read_text() != text):
            path.write_text(text)

    def note_error(self, data: bytes, later: float) -> None:
        """Write the record of the exception.

        Args:
            later: by how many seconds this machine's clock is ahead of the server's.
        """
        record = error_record(data)
        if record is None:
            return
        record["at"] += later
        replace_file(self.copies.error, json.dumps(record), durable=False)

    def end(self, code: int, at: float) -> None:
        """Note its end."""
        if self._code is None:
            self.ended_at, self._code = at, code
            self._wake()

    def lose(self, why: str, at: float) -> None:
        """Note that its server is lost."""
        if self._code is None:
            self.loss = why
            self.end(_KILLED, at)
