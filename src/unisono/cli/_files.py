"""The files of a launch: the fence, the history, what a task's log says."""

from __future__ import annotations

import codecs
import json
import os
import time
from pathlib import Path
from typing import Any

from unisono.cluster._spec import Task


def write_aside(path: Path, text: str) -> None:
    """Replace a file's content so that every reader sees the old or the new one, also after a crash."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
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
    """

    def __init__(self, path: Path) -> None:
        self._path = path
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
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read_error(path: Path) -> dict[str, Any] | None:
    """Return what a task wrote about its exception, None where it has written nothing."""
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return record


def read_capacity(path: Path) -> int | None:
    """Return how many workers there is room for, None where nobody says."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def last_lines(path: Path, start: int, count: int = 25) -> str:
    """Return the last lines of a log, from what was written after the byte `start`."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(start, size - 64 * 1024))
        text = file.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-count:])


class Tail:
    """What is added to a file.

    Args:
        path: the file.
        start: the byte to begin with.
    """

    def __init__(self, path: Path, start: int) -> None:
        self._path, self._position = path, start
        # A character may be cut between two readings.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> str:
        """Return what was added since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        self._position += len(data)
        return self._decoder.decode(data)


def prefixed(text: str, prefix: str, at_start: bool) -> tuple[str, bool]:
    r"""Return text with a prefix on each line, and whether it ends with a whole line.

    Progress bars go back to the line's start; what they write then begins with the prefix again.

    Args:
        text: what comes next.
        prefix: what each line begins with.
        at_start: whether the text before it ended with a whole line.

    >>> prefixed("a\nb", "> ", True)
    ('> a\n> b', False)
    """
    parts = []
    for piece in text.splitlines(keepends=True):
        parts.append(prefix + piece if at_start else piece)
        at_start = piece[-1] in "\r\n"
    return "".join(parts), at_start
