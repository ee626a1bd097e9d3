"""The end of a training, for the process that evaluates its checkpoints.

Tests: tests/virtual/estimator/test_train_and_evaluate.py, tests/cluster/test_estimator.py.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from unisono._checks import local_path
from unisono.checkpoint._markers import read_mark, remove_mark
from unisono.checkpoint._reader import latest_checkpoint
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
        self._directory = local_path(directory)
        self._heart = Heartbeat.from_environ()

    def revoke(self) -> None:
        """Remove the mark of an earlier training: another one begins."""
        remove_mark(self._directory)

    def is_reached(self) -> bool:
        """Return whether there will be no further checkpoint."""
        finished = process_environ().get("UNISONO_FINISHED")
        if finished:
            return Path(finished).exists()
        mark, path = read_mark(self._directory), latest_checkpoint(self._directory)
        return mark is not None and (path is None or os.stat(path).st_mtime_ns <= mark.time_ns)

    def wait(self, seconds: float = _PAUSE) -> None:
        """Wait, but no longer than until training is over, with heartbeats for the launcher.

        Args:
            seconds: at most.
        """
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self.is_reached():
            self._heart.beat()
            time.sleep(min(left, _PAUSE))
