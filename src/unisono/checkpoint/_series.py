"""Checkpoints on the disk: one is written, compared and read; of a series the newest are kept.

Tests: tests/virtual/checkpoint/test_checkpoint.py, tests/virtual/callbacks/test_resume.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from unisono._errors import CheckpointError, CheckpointUnreadableError
from unisono._system._object_store import Place, StorePath
from unisono.checkpoint._arrays import digest_of, load_arrays, save_arrays, stage_arrays
from unisono.checkpoint._snapshot import Snapshot, read_facts
from unisono.checkpoint.commits import _commits
from unisono.step._value_handle import ValueHandle

_FACTS = "facts.json"


def write_snapshot(
    directory: Place,
    name: str,
    snapshot: Snapshot,
    *,
    read_back: bool = False,
    in_one_file: bool = False,
    replaces: bool = False,
) -> Place:
    """Make the commit `directory/name` from a snapshot; waits for the devices and the disk.

    Args:
        read_back: whether to read it again and compare, before it becomes visible.
        in_one_file: whether to write the arrays without Orbax, as in `save_arrays`. In an object store they
            always are: each file is a request.
        replaces: whether an earlier commit of the name is replaced.

    Raises:
        CheckpointUnreadableError: it was written, and cannot be read back; nothing is left.
        CheckpointError: it cannot be written; nothing is left.
    """
    snapshot = staged(directory / name, snapshot, read_back=read_back)
    # One copy on the host for both: reading back compares with exactly what was written.
    arrays = snapshot.on_host()

    def fill(folder: Path) -> None:
        in_file = in_one_file or isinstance(directory, StorePath)
        save_arrays(folder, arrays, in_one_file=in_file, file=snapshot.file)
        (folder / _FACTS).write_text(json.dumps(snapshot.facts))

    def check(folder: Path) -> None:
        problem = _problem_of(folder, dataclasses.replace(snapshot, arrays=arrays))
        if problem:
            raise CheckpointUnreadableError(
                f"A checkpoint must be readable after it was written. Received: {directory / name}, where "
                f"{problem}. Nothing is left of it. Save to another directory."
            )

    try:
        return _commits.write_commit(directory, name, fill, check if read_back else None, replaces=replaces)
    finally:
        if snapshot.file is not None:
            shutil.rmtree(snapshot.file.parent, ignore_errors=True)


def staged(target: Place, snapshot: Snapshot, *, read_back: bool) -> Snapshot:
    """Write now what all workers must read together, each array when it is read; without such, do nothing.

    So that no host holds more than one of them, and later steps may change what lies in parts. The other
    workers call `read_along`.

    Raises:
        CheckpointError: the disk is full or fails; nothing is left then.
    """
    if not any(isinstance(a, ValueHandle) for a in snapshot.arrays.values()):
        return snapshot
    digest = hashlib.sha256()
    aside = _commits.place_aside(target)
    with _commits.translated_errors(target):
        try:
            file, rest = stage_arrays(aside, snapshot.arrays, digest.update if read_back else None)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    return Snapshot(rest, snapshot.facts, file, digest.hexdigest() if read_back else "")


def _problem_of(folder: Path, written: Snapshot) -> str:
    """In what a checkpoint differs from what was written into it; empty where it does not."""
    try:
        read = read_snapshot(folder)
    except CheckpointError as error:
        return f"reading fails ({error})"
    if written.file is not None:
        if digest_of(folder) != written.digest:
            return "arrays have other values"
    elif read.arrays.keys() != written.arrays.keys():
        return f"there are the arrays {sorted(read.arrays)} instead of {sorted(written.arrays)}"
    for name, unread in written.arrays.items():
        other, array = np.asarray(read.arrays[name]), np.asarray(unread)
        # Bytes, because by value NaN differs from itself, and -0.0 equals 0.0.
        if (other.shape, other.dtype) != (array.shape, array.dtype) or other.tobytes() != array.tobytes():
            return f"{name} has other values"
    # What was read went through JSON, which turns tuples into lists; so must the other side.
    return "" if read.facts == json.loads(json.dumps(written.facts)) else "states have other values"


def read_snapshot(path: Place) -> Snapshot:
    """Read a commit.

    Raises:
        CheckpointError: it is not as it was written.
    """
    with _commits.reached(path):
        return _commits.read_commit(path, _load)


def _load(folder: Path) -> Snapshot:
    arrays = load_arrays(folder)
    try:
        return Snapshot(arrays, read_facts((folder / _FACTS).read_bytes(), arrays))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"The states of a checkpoint must be as Unisono writes them. Received: {folder / _FACTS}, where "
            f"{error}. Restore an earlier one."
        ) from error


class CommitSeries:
    """The checkpoints `name-N` of a directory.

    Args:
        keep: how many are kept, the newest; None for all.
        is_preserved: whether one stays that `keep` leaves out.
        check: raises a `CheckpointError` for an unusable one, so that the one before it is used.
    """

    def __init__(
        self,
        directory: Place,
        name: str,
        keep: int | None,
        in_one_file: bool,
        is_preserved: Callable[[Place], bool] = lambda path: False,
        check: Callable[[Snapshot], object] = lambda snapshot: None,
    ) -> None:
        self._directory, self._name, self._keep = directory, name, keep
        self._in_one_file, self._is_preserved, self._check = in_one_file, is_preserved, check
        self._was_read = False

    def paths(self) -> list[Place]:
        """The complete ones, oldest first; damaged ones too."""
        with _commits.reached(self._directory):
            return [path for _, path in _commits.commits(self._directory, self._name)]

    def newest(self) -> tuple[Place, Snapshot] | None:
        """Return the newest undamaged one; see `newest_good`."""
        with _commits.reached(self._directory):
            return _commits.newest_good(self._directory, self._name, self._checked)

    def _checked(self, folder: Path) -> Snapshot:
        snapshot = _load(folder)
        self._check(snapshot)
        return snapshot

    def staged(self, snapshot: Snapshot) -> Snapshot:
        """Write now what all workers must read together, for the next `write`; see `staged`."""
        return staged(self._directory / self._name, snapshot, read_back=not self._was_read)

    def write(self, number: int, snapshot: Snapshot) -> None:
        """Write one, as `write_snapshot`."""
        name = f"{self._name}-{number}"
        # The first is read back: a directory that gives back other bytes is noticed now, not when it matters.
        write_snapshot(
            self._directory, name, snapshot, read_back=not self._was_read, in_one_file=self._in_one_file
        )
        self._was_read = True

    def trim(self) -> None:
        """Delete what `keep` leaves out.

        Only after a new one is complete: a crash in between leaves one too many, and never one too few.
        """
        if self._keep is not None:
            self.delete([path for path in self.paths()[: -self._keep] if not self._is_preserved(path)])

    def delete(self, paths: list[Place]) -> None:
        """Delete some so that none is ever seen half deleted."""
        for path in paths:
            _commits.delete_commit(path)
