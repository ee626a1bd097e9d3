"""What a server runs for a client: files and processes below one directory.

Tests: tests/unit/standalone/test_agent.py, tests/cluster/test_standalone.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unisono._errors import InvalidArgumentError
from unisono.cluster_resolver._spec import Task
from unisono.launcher._plan import RunPaths
from unisono.launcher._processes import TaskProcess, kill_all
from unisono.rpc._frames import blob
from unisono.standalone._outputs import LOG_BYTES, ClientProgress, OutputFiles
from unisono.standalone._protocol import CHUNK, ProcessShape
from unisono.standalone._server_machine import ServerMachine

#: Processes of a job at most: each has a key, which a repeated START names.
_MOST_PROCESSES = 10_000


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
        while (spare := self._machine.take(shape)) is not None:
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
            lacking += max(0, files.size() - known.offset)
            changed = changed or files.version(self._processes[key].poll()) != known.version
        return bool(lacking) or changed, lacking >= LOG_BYTES

    def news(self, seen: Mapping[str, ClientProgress]) -> tuple[dict[str, Any], list[Any]]:
        """Return what a client lacks: the fields for each process, and the blobs that they name."""
        found: dict[str, Any] = {}
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
            is_complete = entry["offset"] >= files.size()
            if is_complete and version != known.version:
                entry["version"] = version
                error = files.read_error()
                if error:
                    entry["error"] = len(blobs)
                    blobs.append(blob(error))
                if code is not None:
                    entry["code"], entry["age"] = code, self._clock() - (process.ended_at or self._clock())
            found[key] = entry
        return found, blobs

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
        """Whether any process runs."""
        return any(process.poll() is None for process in self._processes.values())

    @property
    def count(self) -> int:
        """The number of processes that run."""
        return sum(process.poll() is None for process in self._processes.values())

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.root, ignore_errors=True)
