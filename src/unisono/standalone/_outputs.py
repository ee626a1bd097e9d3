"""What is new of a process for the client: its output, its progress, its exception, its end.

For each process POLL brings `seen[key] = [offset, version]`: how many bytes of its log the client has, and
the version of the rest. The answer has `news[key]` with `offset`, `version`, `log` (the
position of a blob), and once all output was sent `code` and `age` (seconds since the end), `error` (a blob),
`step` (the last line of the progress file).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono._checks import whole_number
from unisono._errors import InvalidArgumentError
from unisono.launcher._run_files import read_error, size_of
from unisono.standalone._protocol import BATCH_SECONDS, POLL_SECONDS

#: Bytes of the logs of all processes in one answer.
LOG_BYTES = 1 << 20
#: Bytes of the record of an exception; a larger one is sent without what was pickled.
ERROR_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class ClientProgress:
    """What a client has of a process.

    Args:
        offset: bytes of its log.
    """

    offset: int
    version: str = ""


def read_seen(meta: Mapping[str, Any]) -> dict[str, ClientProgress]:
    """Return what the client has, from the field of a message.

    >>> read_seen({"g0-worker-0": [5, "x"]})
    {'g0-worker-0': ClientProgress(offset=5, version='x')}
    """
    found = {}
    for key, value in meta.items():
        is_pair = isinstance(value, list) and len(value) == 2
        if not is_pair or whole_number(value[0], 0) is None or not isinstance(value[1], str):
            raise InvalidArgumentError("`seen` must have an offset and a version for each key.")
        found[key] = ClientProgress(value[0], value[1])
    return found


@dataclasses.dataclass(frozen=True)
class OutputFiles:
    """The files of a process on the server."""

    log: Path
    error: Path
    progress: Path

    def version(self, code: int | None) -> str:
        """Return a text that changes when the code or the record of the exception does."""
        return f"{code}/{_mark(self.error)}"

    def size(self) -> int:
        """Return the bytes of the log."""
        return size_of(self.log)

    def read_log(self, offset: int, most: int) -> bytes:
        """Return a part of the log."""
        try:
            with self.log.open("rb") as file:
                file.seek(offset)
                return file.read(most)
        except OSError:  # it was removed
            return b""

    def read_error(self) -> bytes:
        """Return the record of the exception, empty without one; a large one without what was pickled."""
        record = read_error(self.error)
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


@dataclasses.dataclass(frozen=True)
class AnswerTimes:
    """When a POLL came, and when the last one was answered with something; on the monotonic clock."""

    asked: float
    answered_at: float

    def is_due(self, now: float, has_news: bool, is_full: bool) -> bool:
        """Return whether a POLL is answered now.

        Args:
            is_full: whether there is more than one answer holds: then none waits for more.

        >>> AnswerTimes(0.0, 0.0).is_due(0.04, True, False), AnswerTimes(0.0, 0.0).is_due(0.06, True, False)
        (False, True)
        """
        if has_news and (is_full or now - self.answered_at >= BATCH_SECONDS):
            return True
        return now - self.asked >= POLL_SECONDS
