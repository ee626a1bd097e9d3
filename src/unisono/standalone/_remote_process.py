"""A process on a server, as the client's supervisor sees it: its files are copied to the client's directory.

Tests: tests/unit/standalone/test_agent.py, tests/cluster/test_standalone.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono._system._files import replace_file
from unisono.cluster_resolver._spec import Task
from unisono.launcher._run_files import ErrorRecord, error_record

if TYPE_CHECKING:
    from unisono.standalone._link import ServerLink

_LOG = logging.getLogger("unisono")
_KILLED = 128 + signal.SIGKILL
#: The exit code of a task whose result cannot be kept.
_NO_RESULT = 1
#: Bytes of output in memory that the log did not take.
_MOST_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True)
class LocalCopies:
    """Where the files of a process are copied to."""

    log: Path
    error: Path
    progress: Path
    result: Path


class UnwrittenCopies:
    """The output of a task elsewhere that the files of this machine did not take: the task runs on."""

    def __init__(self) -> None:
        self.error: ErrorRecord | None = None
        self._bytes = b""
        self._is_reported = False

    def add(self, data: bytes) -> None:
        """Keep the last of the output."""
        self._bytes = (self._bytes + data)[-_MOST_BYTES:]

    def last_lines(self, count: int = 25) -> str:
        """Return the last lines that the log did not take."""
        return "\n".join(self._bytes.decode(errors="replace").splitlines()[-count:])

    def report(self, error: OSError) -> None:
        """Log a failure of the file system, the first time."""
        if not self._is_reported:
            self._is_reported = True
            _LOG.warning("What a task elsewhere writes cannot be kept here; it runs on: %s", error)

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Suppress a failure of the file system in the block, and report it."""
        try:
            yield
        except OSError as error:
            self.report(error)


class RemoteProcess:
    """A process of a task on a server."""

    def __init__(
        self, key: str, task: Task, host: ServerLink, copies: LocalCopies, wake: Callable[[], None]
    ) -> None:
        self.pid, self.warm, self.loss = 0, False, ""
        self.kept = UnwrittenCopies()
        self.ended_at: float | None = None
        self.key, self.task, self.copies = key, task, copies
        #: Bytes of its output that were copied, and the version of the rest.
        self.offset, self.version = 0, ""
        self._host, self._wake = host, wake
        self._code: int | None = None
        self._step = ""

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
        try:
            with self.copies.log.open("ab") as file:
                file.write(data)
        except OSError as error:
            self.kept.report(error)
            self.kept.add(data)

    def note_step(self, line: str) -> None:
        """Write the last step where it has changed: the file's time is the sign of progress."""
        if line not in ("", self._step):
            self._step = line
            with self.kept.attempt():
                self.copies.progress.write_text(f"{line}\n")

    def note_error(self, data: bytes, later: float) -> None:
        """Write the record of the exception.

        Args:
            later: by how many seconds this machine's clock is ahead of the server's.
        """
        record = error_record(data)
        if record is None:
            return
        record["at"] += later
        self.kept.error = record
        with self.kept.attempt():
            replace_file(self.copies.error, json.dumps(record), durable=False)

    def note_result(self, data: bytes) -> None:
        """Write what the task's function has returned; where that is not possible, the task has failed."""
        try:
            replace_file(self.copies.result, data, durable=False)
        except OSError as error:
            self.loss = f"has returned, and its result cannot be kept on this machine: {error}"
            self.end(_NO_RESULT, time.time())

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
