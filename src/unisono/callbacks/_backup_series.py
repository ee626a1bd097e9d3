"""The numbered backups of a run, written beside training.

Before the first step whatever fails is an error. From then on nothing is: training is worth more than a
backup, and the next one may succeed. A warning says what was not saved, or not deleted.

Tests: tests/virtual/callbacks/test_failing_backups.py, tests/virtual/callbacks/test_resume.py,
tests/cluster/test_backup.py.
"""

from __future__ import annotations

import logging
import time
from types import TracebackType

from unisono._errors import CheckpointError, ClusterError, UnisonoError
from unisono._system._object_store import Place
from unisono._system._task_reports import process_events
from unisono.callbacks._fit_progress import check_progress
from unisono.callbacks._interval import WriteRecord
from unisono.checkpoint import _markers
from unisono.checkpoint._series import CommitSeries
from unisono.checkpoint._snapshot import Snapshot
from unisono.checkpoint._writer import BackgroundWriter, settle
from unisono.checkpoint.commits import _commits

_LOG = logging.getLogger("unisono")
_NAME = "backup"


class FailureWarning:
    """A context that logs an error of its block as a warning, and continues behind the block.

    A `ClusterError` is raised: training itself cannot continue then.

    Args:
        consequence: of the failure, as a sentence.
    """

    def __init__(self, consequence: str) -> None:
        self._consequence = consequence

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # Everything else: clients of stores, and `get_state` of a user's callback, raise errors of their own.
        if not isinstance(error, Exception) or isinstance(error, ClusterError):
            return False
        name = "" if isinstance(error, UnisonoError) else f"{type(error).__name__}: "
        _LOG.warning("%s %s%s", self._consequence, name, error)
        return True


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

    def begin(self) -> tuple[Place, Snapshot] | None:
        """Make the directory ready for this run, and return the newest backup that is as it was written.

        Raises:
            CheckpointError: the directory cannot be used, or none of the backups in it can be read.
        """
        _commits.check_place(self.directory, writes=not self.read_only)
        try:
            if not self.read_only:
                _commits.sweep(self.directory)
                self._remove_mark()
            return self._series.newest()
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                "Before training, the directory of backups must be readable, and what an earlier training "
                f"has left there must be deletable. Received: {error} in {self.directory}. See whether it "
                "can be reached, or pass another directory."
            ) from error

    def _remove_mark(self) -> None:
        """Remove the mark of an earlier end of training, with the backups that it says to discard."""
        mark = _markers.mark_of(self.directory)
        if mark is not None and mark.discard:
            self._series.delete(self._series.paths())
        _markers.remove_mark(self.directory)

    @property
    def is_busy(self) -> bool:
        """True if one is being written."""
        return self._writer.is_busy

    @property
    def is_watched(self) -> bool:
        """True if an evaluator reads them, or where that is unknown."""
        with FailureWarning(f"Whether an evaluator reads {self.directory} is not known: its last is kept."):
            return _markers.is_watched(self.directory)
        return True

    def write(self, snapshot: Snapshot, batches: int) -> None:
        """Start to write one; what all workers must read together is on the disk when this returns."""
        with self.writing(batches):
            staged = self._series.staged(snapshot)
            self._writer.submit(lambda: self._write(staged, batches))
        if not self._asynchronous:
            self._writer.wait()

    @staticmethod
    def writing(batches: int) -> FailureWarning:
        """Surround the making of a backup: a failure is logged."""
        return FailureWarning(
            f"The backup after {batches} batches could not be written, and training continues without it."
        )

    def _write(self, snapshot: Snapshot, batches: int) -> None:
        began, size = time.perf_counter(), snapshot.nbytes
        with self.writing(batches):
            self._series.write(_commits.newest_number(self.directory, _NAME) + 1, snapshot)
            self.written += 1
            process_events().note("backup", step=batches)
            with FailureWarning(
                f"Older backups in {self.directory} could not be deleted, and take its room."
            ):
                self._series.trim()
        self.last = WriteRecord(time.perf_counter() - began, size)

    def wait(self) -> None:
        """Wait until all are on the disk."""
        self._writer.wait()

    def finish(self, delete: bool) -> None:
        """Training has ended well: delete all, and the directory if nothing else is in it.

        An evaluator still reads the newest; the next `fit` deletes it.
        """
        if self.read_only:
            return
        with FailureWarning(
            f"Backups in {self.directory} could not be deleted: the next `fit` with it continues from them."
        ):
            if self.directory.is_dir() and not _commits.is_taken(self.directory):
                self._finish(delete)

    def _finish(self, delete: bool) -> None:
        watched = self.is_watched
        if watched or not delete:
            with FailureWarning(
                f"The end of training could not be noted in {self.directory}, for evaluators."
            ):
                _markers.mark_finished(str(self.directory), discard=delete)
        if delete:
            every = self._series.paths()
            self._series.delete(every[:-1] if watched else every)
            _commits.leave(self.directory)

    def close(self) -> None:
        """End the thread; what is being written becomes complete."""
        self._writer.close()
