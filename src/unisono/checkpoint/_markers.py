"""Two small files beside checkpoints: training is over; an evaluator reads them.

An evaluator must know when there will be no further checkpoint, and training, when it deletes
checkpoints at the end must know that the last one is still to be read.

Tests: tests/unit/checkpoint/test_markers.py, tests/virtual/estimator/test_train_and_evaluate.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

from unisono._system._environ import process_environ
from unisono._system._files import replace_file
from unisono._system._json import parse_json
from unisono._system._object_store import Place, place_of
from unisono._system._task_reports import heartbeat_of_environ
from unisono.checkpoint._reader import latest_checkpoint
from unisono.checkpoint.commits._manifests import MANIFEST

FINISHED = "FINISHED"
_RECORD = "evaluations-{}.json"
#: Seconds between two looks at the directory.
_PAUSE = 0.5


@dataclasses.dataclass(frozen=True)
class Mark:
    """That training is over.

    Args:
        name: of this end, different for each.
        discard: whether the next training deletes the checkpoints beside the mark and starts from scratch.
        time_ns: when it was made, by the file system's clock, in nanoseconds.
    """

    name: str
    discard: bool
    time_ns: int


def mark_finished(directory: str | os.PathLike[str], *, discard: bool = False) -> None:
    """Mark a directory as complete, so that an evaluator does not wait for another checkpoint.

    Call it after the last checkpoint is complete; of several workers, on the chief. `BackupAndRestore`
    does so itself. A later checkpoint makes the mark void.

    Args:
        directory: where checkpoints lie; created.
        discard: whether the checkpoints in it are of no use to a later training.

    Raises:
        OSError: the file cannot be written.

    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> mark_finished(directory)
    >>> os.listdir(directory)
    ['FINISHED']
    """
    folder = place_of(directory)
    folder.mkdir(parents=True, exist_ok=True)
    # A new name each time: an evaluator remembers which mark it has obeyed.
    replace_file(folder / FINISHED, json.dumps({"name": uuid.uuid4().hex, "discard": discard}), durable=False)


def read_mark(directory: Place) -> Mark | None:
    """Return the mark of a directory; None where training may continue, or where it cannot be read now."""
    with contextlib.suppress(OSError):
        return mark_of(directory)
    return None


def mark_of(directory: Place) -> Mark | None:
    """Return the mark of a directory; None where training may continue.

    Raises:
        OSError: the file cannot be read, or the object store does not answer.
    """
    mark = _read(directory / FINISHED)
    if mark is None or not isinstance(mark[0].get("name"), str):
        return None
    return Mark(mark[0]["name"], bool(mark[0].get("discard")), mark[1])


def remove_mark(directory: Place) -> None:
    """Say that training begins."""
    (directory / FINISHED).unlink(missing_ok=True)


def record_path(directory: Place, name: str) -> Place:
    """Where the evaluator `name` of a directory notes what it has evaluated."""
    return directory / _RECORD.format(name)


def is_watched(directory: Place) -> bool:
    """Return whether an evaluator watches a directory, or is to resume when it starts again.

    Raises:
        OSError: the files cannot be read, or the object store does not answer.
    """
    records = (_read(path) for path in directory.glob(_RECORD.format("*")))
    return any(record is not None and record[0].get("watching") is True for record in records)


def _read(path: Place) -> tuple[dict[str, Any], int] | None:
    """A JSON object and when its file was written; None where there is none, or it is something else."""
    try:
        # The file system's clock, which also dates the checkpoints; machines' clocks may differ.
        content, time_ns = parse_json(path.read_text()), path.stat().st_mtime_ns
    except (FileNotFoundError, ValueError):
        return None
    return (content, time_ns) if isinstance(content, dict) else None


class TrainingEnd:
    """The end of another process' training, after which it writes no checkpoints.

    Below `unisono launch` the launcher says so. Otherwise `unisono.checkpoint.mark_finished` does, with a
    mark that no newer checkpoint follows.

    Args:
        directory: of the checkpoints.

    >>> import tempfile
    >>> from unisono.checkpoint import mark_finished
    >>> end = TrainingEnd(tempfile.mkdtemp())
    >>> end.is_reached()
    False
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = place_of(directory)
        self._heart = heartbeat_of_environ()
        finished = process_environ().get("UNISONO_FINISHED")
        #: The file that the launcher writes when training has ended; None without a launcher.
        self.launcher_file = Path(finished) if finished else None

    def revoke(self) -> None:
        """Remove the mark of an earlier training: another one begins."""
        remove_mark(self._directory)

    def is_reached(self) -> bool:
        """Return whether there will be no further checkpoint."""
        if self.launcher_file is not None:
            return self.launcher_file.exists()
        mark, path = read_mark(self._directory), latest_checkpoint(str(self._directory))
        if mark is None or path is None:
            return mark is not None
        return (place_of(path) / MANIFEST).stat().st_mtime_ns <= mark.time_ns

    def wait(self, seconds: float = _PAUSE) -> None:
        """Wait, but no longer than until training is over, with heartbeats for the launcher.

        Args:
            seconds: at most.
        """
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self.is_reached():
            self._heart.beat()
            time.sleep(min(left, _PAUSE))
