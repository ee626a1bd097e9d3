"""`CheckpointManager`: tf.train's class, whose checkpoints are written beside training.

Source of the name: https://www.tensorflow.org/api_docs/python/tf/train/CheckpointManager

Tests: tests/virtual/checkpoint/test_checkpoint.py.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from unisono._checks import is_number
from unisono._errors import CheckpointError, InvalidArgumentError
from unisono._system._files import replace_file
from unisono._system._json import parse_json
from unisono._system._object_store import Place, place_of
from unisono.checkpoint._checkpoint import Checkpoint
from unisono.checkpoint._series import CommitSeries
from unisono.checkpoint._snapshot import Snapshot
from unisono.checkpoint._writer import BackgroundWriter, settle
from unisono.checkpoint.commits import _commits
from unisono.checkpoint.commits._manifests import MANIFEST

_LOG = logging.getLogger("unisono")


class CheckpointManager:
    """Numbered checkpoints in a directory, of which the newest are kept.

    Saving copies the state on the devices and returns; a thread writes it. Use the manager in a
    `with` block, or call `close`, so that the last one is complete and errors are seen. Of several
    workers, which all call `save`, the first writes.

    Args:
        checkpoint: what to save.
        directory: where; created. `s3://bucket/…` and `gs://bucket/…`, too.
        max_to_keep: how many are kept; None for all.
        checkpoint_name: they are called `checkpoint_name-N`.
        asynchronous: whether `save` returns before the checkpoint is on the disk.
        init_fn: called by `restore_or_initialize` where there is no checkpoint.
        keep_checkpoint_every_n_hours: of the checkpoints that `max_to_keep` leaves out, one is kept so many
            hours after the last one of these, or after the start; None for none.
        in_one_file: whether arrays are written as one safetensors file, and not by Orbax.

    Raises:
        InvalidArgumentError: when `max_to_keep` is below 1.
        CheckpointError: when `directory` is not a directory or cannot be read.

    >>> import tempfile
    >>> import keras
    >>> from unisono.checkpoint import Checkpoint
    >>> step = keras.Variable(0)
    >>> with CheckpointManager(Checkpoint(step=step), tempfile.mkdtemp(), max_to_keep=3) as manager:
    ...     path = manager.save()
    >>> manager.latest_checkpoint == path
    True
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        *,
        checkpoint_name: str = "ckpt",
        asynchronous: bool = True,
        init_fn: Callable[[], Any] | None = None,
        keep_checkpoint_every_n_hours: float | None = None,
        in_one_file: bool = False,
    ) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise InvalidArgumentError(
                f"`max_to_keep` must be at least 1. Received: max_to_keep={max_to_keep}. None keeps all."
            )
        self._checkpoint = checkpoint
        self.directory = place_of(directory)
        self._name, self._init = checkpoint_name, init_fn
        self._asynchronous = asynchronous
        self._every = None if keep_checkpoint_every_n_hours is None else keep_checkpoint_every_n_hours * 3600
        self._began = time.time()
        _commits.check_place(self.directory, writes=False)
        self._writer = BackgroundWriter(self.directory)
        _commits.sweep(self.directory)
        self._newest = 0
        self._series = CommitSeries(
            self.directory, checkpoint_name, max_to_keep, in_one_file, self._is_preserved
        )
        #: The last checkpoint for which not all workers have waited.
        self._unshared: str | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that is saved."""
        return self._checkpoint

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the complete checkpoints, oldest first; waits while one is being written."""
        settle(self.directory)
        return [str(path) for path in self._series.paths()]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint, or None; waits while one is being written.

        Raises:
            CheckpointError: it could not be written.
        """
        self.wait()
        every = self.checkpoints
        return every[-1] if every else None

    def save(self, checkpoint_number: int | None = None) -> str:
        """Save everything as it is now.

        Args:
            checkpoint_number: such as the step; the next number if None.

        Returns:
            The path, which exists once the checkpoint is complete.

        Raises:
            CheckpointError: this or an earlier checkpoint could not be written.
        """
        # One at a time: each that waits for the disk holds a copy of the whole state. This also raises the
        # error of the save before.
        self._writer.wait()
        # Also for another manager of this directory.
        settle(self.directory)
        newest = max(self._newest, _commits.newest_number(self.directory, self._name))
        if checkpoint_number is None:
            # The first worker may have written this one before another looks for the newest.
            number = self._checkpoint._number(str(self.directory / self._name), newest + 1)
        else:
            number = int(checkpoint_number)
        self._newest = max(newest, number)
        path = self._unshared = str(self.directory / f"{self._name}-{number}")
        if self._checkpoint._is_written_here():
            snapshot = self._series.staged(self._checkpoint._snapshot())
            self._writer.submit(lambda: self._write(number, snapshot))
        else:
            self._checkpoint._read_along()
        if not self._asynchronous:
            self.wait()
            self._writer.close()
        return path

    def _write(self, number: int, snapshot: Snapshot) -> None:
        self._series.write(number, snapshot)
        self._series.trim()

    def _is_preserved(self, path: Place) -> bool:
        """Return whether a checkpoint stays which `max_to_keep` leaves out; remember it if so."""
        if self._every is None:
            return False
        note = self.directory / f".{self._name}.preserved"
        preserved = _preserved_in(note)
        written = (path / MANIFEST).stat().st_mtime
        if path.name not in preserved:
            if written - self._every < max(preserved.values(), default=self._began):
                return False
            preserved[path.name] = written
            replace_file(note, json.dumps(preserved), durable=False)
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all checkpoints are on the disk.

        Args:
            timeout: seconds.

        Raises:
            CheckpointError: one could not be written, or the time is over.
        """
        self._writer.wait(timeout)
        # `share` waits for all workers, so each of them must call it once per save.
        path, self._unshared = self._unshared, None
        if path is not None:
            self._checkpoint._share(path)

    def restore_or_initialize(self) -> str | None:
        """Restore the newest checkpoint that is as it was written; a damaged one is passed over and logged.

        Returns:
            Its path; None where there is none, after `init_fn` was called.

        Raises:
            CheckpointMismatchError: the checkpoint is of other objects.
            CheckpointError: there are checkpoints and all are damaged.
        """
        self.wait()
        settle(self.directory)
        newest = self._series.newest()
        if newest is None:
            if self._init is not None:
                self._init()
            return None
        path, snapshot = newest
        self._checkpoint._put(snapshot, str(path))
        return str(path)

    def close(self) -> None:
        """Finish writing and end the thread.

        Raises:
            CheckpointError: a checkpoint could not be written.
        """
        # The thread ends in any case; then `wait` raises what went wrong in it.
        self._writer.close()
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError:
            # The block's own error is the cause; an error of closing is mostly a consequence.
            if error is None:
                raise


def _preserved_in(note: Place) -> dict[str, float]:
    """Return the checkpoints that stay, and when they were written; an unreadable note is begun again."""
    try:
        times = parse_json(note.read_text())
        if not isinstance(times, dict) or not all(map(is_number, times.values())):
            raise ValueError("there are no times by name")
        return {name: float(written) for name, written in times.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, OverflowError) as error:
        _LOG.warning("%s cannot be read (%s): which checkpoints to keep is noted anew.", note, error)
        return {}
