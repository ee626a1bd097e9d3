"""The files of a launch: the fence, the history, errors and logs of tasks."""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NotRequired, TypedDict, cast

from unisono._errors import ClusterError, InvalidArgumentError
from unisono._system._json import parse_json
from unisono.cluster_resolver._spec import Task
from unisono.launcher.terminal._printable import one_line

#: The most bytes of a log that are read at once: a task may print faster than a terminal shows.
_CHUNK = 1 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class BestEffort:
    """Tolerates failures of the file system where a launch can continue; reports the first one."""

    def __init__(self, warn: Callable[[str], None], root: Path) -> None:
        self._warn, self._root = warn, root
        self._failed = False

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Suppress and report a failure of the file system in the block."""
        try:
            yield
        except OSError as error:
            self.note(error.strerror or str(error))

    def note(self, why: str) -> None:
        """Report a failure, unless one was reported before."""
        if not self._failed:
            self._failed = True
            self._warn(
                f"unisono: the log directory cannot be written ({why}): {self._root}; the launch continues "
                "with incomplete logs and history"
            )


@contextlib.contextmanager
def locked(root: Path, files: BestEffort) -> Iterator[None]:
    """Lock the directory of a launch, because two launchers would overwrite each other's fence.

    Raises:
        ClusterError: when another launcher uses it.
        InvalidArgumentError: when it cannot be written; on a full disk the launch runs without the lock.
    """
    try:
        file = (root / "lock").open("w")
    except OSError as error:
        if error.errno in _NO_ROOM:
            files.note(os.strerror(error.errno))
            yield
            return
        raise InvalidArgumentError(
            f"The log directory must be writable. Received: {str(root)!r} "
            f"({error.strerror}). Write `--log-dir` with another directory."
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClusterError(
                "A log directory must serve one launcher at a time. "
                f"Received: {root}, which another launcher uses. "
                "Write `--log-dir` with another directory."
            ) from None
        yield


def has_room(path: Path) -> bool:
    """Return whether the file system of a directory has free blocks, True where that is unknown."""
    try:
        state = os.statvfs(path)
    except OSError:
        return True
    # The superuser may use the reserved blocks, too.
    free = state.f_bavail if os.geteuid() else state.f_bfree
    # Virtual file systems report zero blocks in all; they are not full.
    return free > 0 or state.f_blocks == 0


def write_secret(path: Path, text: str) -> None:
    """Write a new file that its owner alone may read."""
    path.unlink(missing_ok=True)
    # Its mode from the beginning, and not later: another process could have it open by then.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


class History:
    """The log of events for programs, one JSON object per line."""

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
        **facts: int,
    ) -> None:
        """Append an event, with the time in seconds since the epoch, and more that is known of it."""
        line = {
            "time": time.time(),
            "event": event,
            "generation": self.generation,
            "task": None if task is None else str(task),
            "pid": pid,
            "exit_code": exit_code,
            "detail": detail,
            **facts,
        }
        with self._files.attempt(), self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class ErrorRecord(TypedDict):
    """A task's record of the exception that ends it, written by `_task._report`.

    Args:
        at: when, in seconds since the epoch.
        code: the exit code; 42 is no failure: the state is saved, and the process is about to end.
        summary: one line for the terminal.
        pickle: the exception, by `cloudpickle` and in base64; None where it cannot be pickled.
        apart: whether the program does not use the parameter servers that were started for it.
    """

    at: float
    code: int
    summary: str
    traceback: str
    pickle: NotRequired[str | None]
    apart: NotRequired[bool]


def names_in(folder: Path) -> set[str]:
    """Return the names of the files in a directory; none where it is missing."""
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def read_error(path: Path) -> ErrorRecord | None:
    """Return a task's record of its exception, None where there is none or it is incomplete."""
    try:
        return error_record(path.read_bytes())
    except OSError:
        return None


def error_record(data: bytes) -> ErrorRecord | None:
    """Return the record that a task has written of its exception, None where it is incomplete."""
    try:
        record = parse_json(data)
    except ValueError:  # a full disk or a crash of the machine leaves a part of the file
        return None
    kinds = {"at": float, "code": int, "summary": str, "traceback": str}
    if not isinstance(record, dict) or not all(isinstance(record.get(n), k) for n, k in kinds.items()):
        return None
    # Part of the launcher's own lines.
    return cast(ErrorRecord, record | {"summary": one_line(record["summary"])})


def read_capacity(path: Path) -> int | None:
    """Return the number of workers in the capacity file, None where it does not hold a number."""
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        return None
    # Others write this file. `int` alone would also accept "1_0" and "+1", and digits without end.
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def last_lines(path: Path, start: int, count: int = 25) -> str:
    """Return the last lines of a log, without what precedes the byte `start`."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(max(min(start, size), size - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:  # the log was removed
        return ""
    return "\n".join(text.splitlines()[-count:])


def size_of(path: Path) -> int:
    """Return the size of a file in bytes, 0 where it is missing."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Tail:
    """Reads what is appended to a file, also after the file was removed.

    Args:
        start: the byte to begin with.
    """

    def __init__(self, path: Path, start: int) -> None:
        self._path, self._position = path, start
        self._end: int | None = None
        self._file: io.BufferedReader | None = None
        # Open now: the log may be removed while its task still writes.
        self._open()
        # A multi-byte character may be divided between two reads.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> str:
        """Return the text appended since the last call, at most one mebibyte."""
        file = self._open()
        if file is None:
            return ""
        if os.fstat(file.fileno()).st_size < self._position:  # truncated, as by `> worker-0.log`
            self._position = 0
        file.seek(self._position)
        left = _CHUNK if self._end is None else max(0, self._end - self._position)
        data = file.read(min(_CHUNK, left))
        self._position += len(data)
        return self._decoder.decode(data)

    def stop(self) -> None:
        """Read no further than the file's current end: what follows is another task's, or a daemon's."""
        if self._end is None:
            with contextlib.suppress(OSError):  # the log was removed: a later task has a file of its own
                self._end = self._path.stat().st_size

    def parts_left(self) -> int:
        """Return the number of calls of `read` that reach the end."""
        file = self._open()
        size = 0 if file is None else os.fstat(file.fileno()).st_size
        left = 0 if file is None else min(size, size if self._end is None else self._end) - self._position
        return -(-left // _CHUNK) if left >= 0 else 1

    def _open(self) -> io.BufferedReader | None:
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except OSError:
                return None
        return self._file

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
