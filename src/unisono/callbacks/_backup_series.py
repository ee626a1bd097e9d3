"""The numbered backups of a run, written beside training.

Tests: tests/virtual/callbacks/test_resume.py, tests/cluster/test_backup.py.
"""

from __future__ import annotations

import logging
import time

from unisono._errors import CheckpointError, CheckpointUnreadableError
from unisono._system._object_store import Place
from unisono.callbacks._fit_progress import check_progress
from unisono.callbacks._interval import WriteRecord
from unisono.checkpoint import _markers
from unisono.checkpoint._series import CommitSeries
from unisono.checkpoint._snapshot import Snapshot
from unisono.checkpoint._writer import BackgroundWriter, settle
from unisono.checkpoint.commits import _commits

_LOG = logging.getLogger("unisono")
_NAME = "backup"
_NOT_WRITTEN = "A backup could not be written, and training continues without it. %s"


class Backups:
    """The numbered backups of a directory, written beside training.

    Args:
        asynchronous: whether `write` returns before the backup is on the disk.
    """

    def __init__(self, directory: Place, keep: int, asynchronous: bool, read_only: bool = False) -> None:
        self.directory = directory
        self.read_only = read_only
        self.written = 0
        self.last: WriteRecord | None = None
        self._asynchronous = asynchronous
        self._series = CommitSeries(directory, _NAME, keep, in_one_file=True, check=check_progress)
        self._writer = BackgroundWriter(directory, "unisono-backup")
        # A `fit` of this program that failed may still be writing.
        settle(directory)
        if not read_only:
            _commits.sweep(directory)
            self._begin()

    @property
    def is_busy(self) -> bool:
        """Whether one is being written."""
        return self._writer.is_busy

    @property
    def is_watched(self) -> bool:
        """Whether an evaluator reads them."""
        return _markers.is_watched(self.directory)

    def newest(self) -> tuple[Place, Snapshot] | None:
        """The newest one that is as it was written."""
        return self._series.newest()

    def write(self, snapshot: Snapshot) -> None:
        """Start to write one; what all workers must read together is on the disk when this returns."""
        try:
            staged = self._series.staged(snapshot)
        except CheckpointError as error:
            _LOG.warning(_NOT_WRITTEN, error)
            return
        self._writer.submit(lambda: self._write(staged))
        if not self._asynchronous:
            self._writer.wait()

    def _write(self, snapshot: Snapshot) -> None:
        began, size = time.perf_counter(), snapshot.nbytes
        try:
            self._series.write(_commits.newest_number(self.directory, _NAME) + 1, snapshot)
            self.written += 1
        except CheckpointUnreadableError:
            raise
        except CheckpointError as error:
            # Training is worth more than one backup: the next may find room again.
            _LOG.warning(_NOT_WRITTEN, error)
        self.last = WriteRecord(time.perf_counter() - began, size)

    def wait(self) -> None:
        """Wait until all are on the disk."""
        self._writer.wait()

    def _begin(self) -> None:
        """Remove the mark of an earlier end of training, with the backups that it says to discard."""
        mark = _markers.read_mark(self.directory)
        if mark is not None and mark.discard:
            self._series.delete(self._series.paths())
        _markers.remove_mark(self.directory)

    def finish(self, delete: bool) -> None:
        """Training has ended well: delete all, and the directory if nothing else is in it.

        An evaluator still reads the newest; the next `fit` deletes it.
        """
        if self.read_only or not self.directory.is_dir() or _commits.is_taken(self.directory):
            return
        watched = self.is_watched
        if watched or not delete:
            _markers.mark_finished(str(self.directory), discard=delete)
        if delete:
            every = self._series.paths()
            self._series.delete(every[:-1] if watched else every)
            _commits.leave(self.directory)

    def close(self) -> None:
        """End the thread; what is being written becomes complete."""
        self._writer.close()
