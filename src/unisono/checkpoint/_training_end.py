"""The end of a training, for the process that evaluates its checkpoints.

Tests: tests/virtual/estimator/test_train_and_evaluate.py, tests/cluster/test_estimator.py.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from unisono._system._object_store import place_of
from unisono.checkpoint._markers import read_mark, remove_mark
from unisono.checkpoint._reader import latest_checkpoint
from unisono.checkpoint.commits._manifests import MANIFEST
from unisono.cluster.liveness._heartbeat_file import Heartbeat
from unisono.cluster_resolver._base import process_environ

#: Seconds between two looks at the directory.
_PAUSE = 0.5


class TrainingEnd:
    """Whether a training that another process runs will write further checkpoints.

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
        self._heart = Heartbeat.from_environ()
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
