"""A client's job on a server: files and processes below one directory, and news of them.

For each process POLL brings `seen[key] = [offset, version]`: how many bytes of its log the client has, and
the version of the rest. The answer has `news[key]` with `offset`, `version`, `log` (the
position of a blob), and once all output was sent `code` and `age` (seconds since the end), `error` (a blob),
`step` (the last line of the progress file).

Tests: tests/unit/standalone/test_agent.py, tests/unit/standalone/test_outputs.py,
tests/cluster/test_standalone.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unisono._checks import whole_number
from unisono._errors import InvalidArgumentError
from unisono.cluster_resolver._spec import Task
from unisono.launcher._plan import RunPaths
from unisono.launcher._processes import TaskProcess, UnwrittenOutput, kill_all
from unisono.launcher._run_files import read_error, size_of
from unisono.rpc._frames import blob
from unisono.standalone._protocol import BATCH_SECONDS, CHUNK, POLL_SECONDS, ProcessShape
from unisono.standalone._server_machine import ServerMachine

#: Bytes of the logs of all processes in one answer.
LOG_BYTES = 1 << 20
#: Bytes of the record of an exception; a larger one is sent without what was pickled.
ERROR_BYTES = 4 << 20
#: Folders of a job that others than its client may read.
_SEEN_FOLDERS = ("events", "progress")
#: Processes of a job at most: each has a key, which a repeated START names.
_MOST_PROCESSES = 10_000


@dataclasses.dataclass(frozen=True)
class ClientProgress:
    """A client's knowledge of a process.

    Args:
        offset: bytes of its log.
    """

    offset: int
    version: str = ""


def read_seen(meta: Mapping[str, Any]) -> dict[str, ClientProgress]:
    """Return the client's progress, from the field of a message.

    >>> read_seen({"g0-worker-0": [5, "x"]})
    {'g0-worker-0': ClientProgress(offset=5, version='x')}
    """
    progress = {}
    for key, value in meta.items():
        is_pair = isinstance(value, list) and len(value) == 2
        if not is_pair or whole_number(value[0], 0) is None or not isinstance(value[1], str):
            raise InvalidArgumentError("`seen` must have an offset and a version for each key.")
        progress[key] = ClientProgress(value[0], value[1])
    return progress


@dataclasses.dataclass(frozen=True)
class OutputFiles:
    """The files of a process on the server."""

    log: Path
    error: Path
    progress: Path

    def version(self, code: int | None) -> str:
        """Return a text that changes when the code or the record of the exception does."""
        return f"{code}/{_mark(self.error)}"

    def read_log(self, offset: int, most: int) -> bytes:
        """Return a part of the log."""
        try:
            with self.log.open("rb") as file:
                file.seek(offset)
                return file.read(most)
        except OSError:  # it was removed
            return b""

    def read_error(self, kept: UnwrittenOutput | None = None) -> bytes:
        """Return the record of the exception, empty without one; a large one without what was pickled.

        Args:
            kept: has the record where the disk did not take it.
        """
        record = read_error(self.error) or (None if kept is None else kept.error)
        if record is None:
            return b""
        data = json.dumps(record).encode()
        if len(data) > ERROR_BYTES:
            texts = {"traceback": record["traceback"][-(1 << 16) :], "summary": record["summary"][:4096]}
            data = json.dumps({"at": record["at"], "code": record["code"], **texts}).encode()
        return data

    def read_step(self) -> str:
        """Return the last line of the progress file, empty without one."""
        try:
            with self.progress.open("rb") as file:
                file.seek(max(0, size_of(self.progress) - 200))
                lines = file.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        return next((line for line in reversed(lines) if line.strip()), "")


def _mark(path: Path) -> str:
    try:
        state = os.stat(path)
    except OSError:
        return ""
    return f"{state.st_mtime_ns}-{state.st_size}"


def is_due(now: float, asked: float, answered_at: float, has_news: bool, is_full: bool) -> bool:
    """Return whether a POLL is answered now.

    Args:
        now: as the others, in seconds of the agent's clock.
        answered_at: when the last one was answered with something.
        is_full: whether there is more than one answer holds: then none waits for more.

    >>> is_due(0.04, 0.0, 0.0, has_news=True, is_full=False), is_due(0.06, 0.0, 0.0, True, False)
    (False, True)
    """
    if has_news and (is_full or now - answered_at >= BATCH_SECONDS):
        return True
    return now - asked >= POLL_SECONDS


class ServerJob:
    """The files and processes of a job on a server.

    Args:
        root: its directory, which may hold what an earlier server process has left.
    """

    def __init__(self, root: Path, machine: ServerMachine, clock: Callable[[], float] = time.time) -> None:
        self.root = root
        self._machine, self._clock = machine, clock
        self._paths = RunPaths(root)
        self._processes: dict[str, TaskProcess] = {}
        self._files: dict[str, OutputFiles] = {}
        self._generation = -1
        for folder in ("errors", "events", "progress"):
            (root / folder).mkdir(parents=True, exist_ok=True, mode=0o700)

    def put(self, name: str, offset: int, size: int, data: memoryview) -> None:
        """Write a part of a file that has `size` bytes in the end; a repetition changes nothing."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(descriptor, data[written:], offset + written)
            os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)

    def get(self, name: str, offset: int) -> tuple[int, bytes]:
        """Return the size of a file, and a part of it."""
        try:
            with (self.root / name).open("rb") as file:
                file.seek(offset)
                return os.fstat(file.fileno()).st_size, file.read(CHUNK)
        except OSError as error:
            raise InvalidArgumentError(f"The file {name!r} cannot be read: {error.strerror}.") from None

    def listing(self, folder: str) -> dict[str, list[float]]:
        """Return the files of a folder that may be looked at: their bytes, and when they were written."""
        if folder not in _SEEN_FOLDERS:
            raise InvalidArgumentError(f"The folder must be one of {', '.join(_SEEN_FOLDERS)}.")
        files = {}
        for entry in os.scandir(self.root / folder):
            state = entry.stat(follow_symlinks=False)
            files[entry.name] = [state.st_size, state.st_mtime]
        return files

    def look(self, name: str, offset: int) -> bytes:
        """Return a part of such a file; none where there is no such file."""
        if name.partition("/")[0] not in _SEEN_FOLDERS:
            raise InvalidArgumentError(f"The file must be in one of {', '.join(_SEEN_FOLDERS)}.")
        try:
            with (self.root / name).open("rb") as file:
                file.seek(offset)
                return file.read(CHUNK)
        except OSError:
            return b""

    def start(
        self, key: str, task: Task, generation: int, shape: ProcessShape, description: Mapping[str, Any]
    ) -> int:
        """Start a process, unless it was started before; return where its output begins in the log.

        Raises:
            InvalidArgumentError: when there are too many.
            OSError: when the system cannot start it.
        """
        if key not in self._processes:
            if len(self._processes) >= _MOST_PROCESSES:
                raise InvalidArgumentError(f"A job must have at most {_MOST_PROCESSES} processes in all.")
            self._begin(generation)
            files = OutputFiles(
                self.root / f"{key}.log",
                self._paths.error(task, generation),
                self._paths.progress(task, generation),
            )
            files.error.unlink(missing_ok=True)
            files.progress.unlink(missing_ok=True)
            job = {**description, "log": str(files.log), "error": str(files.error)}
            self._processes[key] = self._assigned(shape, files.log, job)
            self._files[key] = files
        return self._processes[key].pid

    def _assigned(self, shape: ProcessShape, log: Path, job: Mapping[str, Any]) -> TaskProcess:
        while (spare := self._machine.claim_spare(shape)) is not None:
            if spare.assign(job):
                return spare
            kill_all([spare])
        process = self._machine.start(shape, log)
        process.assign(job)
        return process

    def _begin(self, generation: int) -> None:
        if generation > self._generation:
            self._generation = generation
            self._paths.fence.write_text(f"{generation}\n")
            self._paths.finished.unlink(missing_ok=True)

    def send(self, key: str, number: int) -> None:
        """Send a signal to a process; SIGKILL to its children, too. One that has ended gets none."""
        process = self._processes.get(key)
        if process is None or process.poll() is not None:
            return
        if number == signal.SIGKILL:
            process.kill()
        else:
            process.send(number)

    def has_news(self, seen: Mapping[str, ClientProgress]) -> tuple[bool, bool]:
        """Return whether a client lacks something, and whether it is more than one answer holds."""
        lacking = 0
        changed = False
        for key, files in self._files.items():
            known = seen.get(key)
            if known is None:
                continue
            lacking += max(0, size_of(files.log) - known.offset)
            changed = changed or files.version(self._processes[key].poll()) != known.version
        return bool(lacking) or changed, lacking >= LOG_BYTES

    def news(self, seen: Mapping[str, ClientProgress]) -> tuple[dict[str, Any], list[Any]]:
        """Return the news for a client: the fields for each process, and the blobs that they name."""
        entries: dict[str, Any] = {}
        blobs: list[Any] = []
        room = LOG_BYTES
        for key, files in self._files.items():
            known = seen.get(key)
            if known is None:
                continue
            process = self._processes[key]
            # Before the log is read: what the process has written by then is in it.
            code, version = process.poll(), files.version(process.poll())
            log = files.read_log(known.offset, room)
            room -= len(log)
            entry: dict[str, Any] = {"offset": known.offset + len(log), "step": files.read_step()}
            if log:
                entry["log"] = len(blobs)
                blobs.append(blob(log))
            is_complete = entry["offset"] >= size_of(files.log)
            if is_complete and version != known.version:
                entry["version"] = version
                error = files.read_error(process.kept)
                if error:
                    entry["error"] = len(blobs)
                    blobs.append(blob(error))
                if code is not None:
                    entry["code"], entry["age"] = code, self._clock() - (process.ended_at or self._clock())
            entries[key] = entry
        return entries, blobs

    def terminate(self) -> None:
        """Send SIGTERM to all processes."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all processes."""
        for process in self._processes.values():
            process.kill()

    @property
    def is_running(self) -> bool:
        """True if any process runs."""
        return any(process.poll() is None for process in self._processes.values())

    @property
    def count(self) -> int:
        """The number of processes that run."""
        return sum(process.poll() is None for process in self._processes.values())

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.root, ignore_errors=True)
