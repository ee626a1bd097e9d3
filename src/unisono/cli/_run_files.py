"""The files of a launch: the fence, the history, what a task's log says."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from unisono.cluster_resolver._spec import Task

#: Bytes of a log that are read at once: a task may print faster than a terminal shows.
_CHUNK = 1 << 20


class BestEffort:
    """Runs what a launch can go on without; the first failure of the file system is reported.

    Args:
        warn: shows one line.
        root: the directory of the files.
    """

    def __init__(self, warn: Callable[[str], None], root: Path) -> None:
        self._warn, self._root = warn, root
        self._failed = False

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Go on after a failure of the file system in the block."""
        try:
            yield
        except OSError as error:
            self.note(error.strerror or str(error))

    def note(self, why: str) -> None:
        """Report the first failure.

        Args:
            why: such as "No space left on device".
        """
        if not self._failed:
            self._failed = True
            self._warn(
                f"unisono: the log directory cannot be written ({why}): {self._root}; the launch goes on, "
                "with incomplete logs and history"
            )


def has_room(path: Path) -> bool:
    """Return whether the file system of a directory has free blocks, and True where it does not say."""
    try:
        state = os.statvfs(path)
    except OSError:
        return True
    # The superuser may use the blocks that are kept back.
    free = state.f_bavail if os.geteuid() else state.f_bfree
    return free > 0 or state.f_blocks == 0


def write_aside(path: Path, text: str) -> None:
    """Replace a file's content so that every reader sees the old or the new one, also after a crash."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class History:
    """What happened, for programs: a JSON object per line.

    Args:
        path: the file; lines are appended.
        files: reports that it cannot be written.
    """

    def __init__(self, path: Path, files: BestEffort) -> None:
        self._path, self._files = path, files
        self.generation = 0

    def write(
        self,
        event: str,
        task: Task | None = None,
        pid: int | None = None,
        exit_code: int | None = None,
        detail: str = "",
    ) -> None:
        """Append one event, with the time in seconds since the epoch."""
        line = {
            "time": time.time(),
            "event": event,
            "generation": self.generation,
            "task": None if task is None else str(task),
            "pid": pid,
            "exit_code": exit_code,
            "detail": detail,
        }
        with self._files.attempt(), self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read_error(path: Path) -> dict[str, Any] | None:
    """Return what a task wrote about its exception, None where it wrote nothing that can be read."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):  # a full disk, or a machine that crashed, leaves a part of it
        return None
    kinds = {"at": float, "code": int, "summary": str, "traceback": str}
    complete = isinstance(record, dict) and all(isinstance(record.get(n), k) for n, k in kinds.items())
    return record if complete else None


def read_capacity(path: Path) -> int | None:
    """Return how many workers there is room for, None where the file does not hold a number."""
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        return None
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def last_lines(path: Path, start: int, count: int = 25) -> str:
    """Return the last lines of a log, from what was written after the byte `start`."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(max(min(start, size), size - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:  # it was removed
        return ""
    return "\n".join(text.splitlines()[-count:])


def size_of(path: Path) -> int:
    """Return the bytes of a file, 0 where it is missing."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Tail:
    """What is added to a file, also where it is removed meanwhile.

    Args:
        path: the file.
        start: the byte to begin with.
    """

    def __init__(self, path: Path, start: int) -> None:
        self._path, self._position = path, start
        self._file: io.BufferedReader | None = None
        self._opened()
        # A character may be cut between two readings.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> str:
        """Return what was added since the last call, at most a mebibyte of it."""
        file = self._opened()
        if file is None:
            return ""
        if os.fstat(file.fileno()).st_size < self._position:  # emptied by `> worker-0.log`
            self._position = 0
        file.seek(self._position)
        data = file.read(_CHUNK)
        self._position += len(data)
        return self._decoder.decode(data)

    def parts_left(self) -> int:
        """Return how many calls of `read` it takes to reach the end that the file has now."""
        file = self._opened()
        left = 0 if file is None else os.fstat(file.fileno()).st_size - self._position
        return -(-left // _CHUNK) if left >= 0 else 1

    def _opened(self) -> io.BufferedReader | None:
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except OSError:
                return None
        return self._file

    def close(self) -> None:
        """Release the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
