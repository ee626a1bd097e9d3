"""`Checkpoint` and `CheckpointManager`: tf.train's two classes, atomic, checked and flushed.

Source of the names: https://www.tensorflow.org/api_docs/python/tf/train/Checkpoint
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from unisono._errors import CheckpointError, InvalidArgumentError
from unisono.checkpoint import _commits
from unisono.checkpoint._arrays import load_arrays, save_arrays
from unisono.checkpoint._contents import Parts, Snapshot
from unisono.checkpoint._writer import BackgroundWriter
from unisono.training._bind import holder_of

_FACTS = "facts.json"


def write_snapshot(directory: Path, name: str, snapshot: Snapshot) -> Path:
    """Make the commit `directory/name` from a snapshot; waits for the devices and the disk."""
    arrays = snapshot.on_host()

    def fill(folder: Path) -> None:
        save_arrays(folder, arrays)
        (folder / _FACTS).write_text(json.dumps(snapshot.facts))

    return _commits.write_commit(directory, name, fill)


def read_snapshot(path: Path, *, checked: bool = False) -> Snapshot:
    """Read a commit.

    Args:
        path: of the commit.
        checked: whether it was compared with its manifest already.

    Raises:
        CheckpointError: it is not as it was written.
    """
    if not checked:
        _commits.check_commit(path)
    return Snapshot(load_arrays(path), json.loads((path / _FACTS).read_text()))


class Checkpoint:
    """Objects that are saved and restored together, under any strategy and number of replicas.

    Args:
        **objects: Keras models (weights, random state and optimizer), layers, optimizers, metrics,
            `keras.Variable`s and `unisono.Variable`s; iterators of `unisono.data` and anything else
            with `get_state` and `set_state`; lists and dicts of these; pytrees of arrays and numbers.

    >>> import tempfile, keras
    >>> step = keras.Variable(3, dtype="int32")
    >>> path = Checkpoint(step=step).save(tempfile.mkdtemp() + "/first")
    >>> _ = step.assign(0)
    >>> Checkpoint(step=step).restore(path), int(step.value)
    ({}, 3)
    """

    def __init__(self, **objects: Any) -> None:
        if not objects:
            raise InvalidArgumentError(
                "A checkpoint must hold something. Received: no objects. Write `Checkpoint(model=model)`."
            )
        self._objects = objects

    def include(self, **objects: Any) -> None:
        """Save and restore these too.

        Args:
            **objects: as for the constructor.

        Raises:
            InvalidArgumentError: a name is taken.
        """
        taken = sorted(set(objects) & set(self._objects))
        if taken:
            raise InvalidArgumentError(
                f"Names in a checkpoint must differ. Received: {taken[0]!r} twice. Use another name."
            )
        self._objects = {**self._objects, **objects}

    def parts(self) -> Parts:
        """The variables and states of the objects as they are now."""
        return Parts(self._objects)

    def snapshot(self) -> Snapshot:
        """A copy of everything, which later steps do not change."""
        return self.parts().snapshot()

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write a checkpoint; returns when it is on the disk.

        Args:
            path: a directory that does not exist yet.

        Returns:
            The path.

        Raises:
            CheckpointError: it exists, or cannot be written; nothing is left then.
        """
        target = Path(path).absolute()
        if self.is_written_here():
            write_snapshot(target.parent, target.name, self.snapshot())
        self.share(str(target))
        return str(target)

    def is_written_here(self) -> bool:
        """Whether this process writes: of several workers the first does, for all."""
        strategy = self._shared_by()
        return strategy is None or bool(strategy.is_chief)

    def share(self, path: str) -> None:
        """Wait, on all workers but the first, until the first has written a checkpoint.

        Args:
            path: of the checkpoint.
        """
        strategy = self._shared_by()
        if strategy is not None:
            strategy.share_file(path)

    def number(self, series: str, number: int) -> int:
        """Return the number of the next checkpoint of a series, the same on all workers.

        Args:
            series: the path without the number.
            number: what this worker would choose.
        """
        strategy = self._shared_by()
        return number if strategy is None else int(strategy.checkpoint_number(series, number))

    def _shared_by(self) -> Any | None:
        """The strategy of several workers that holds what is saved; None without one."""
        holders = (holder_of(variable) for variable in self.parts().variables.values())
        return next((s for s in holders if s is not None and s.mesh.is_spread), None)

    def restore(self, path: str | os.PathLike[str], parts: Sequence[str] | None = None) -> dict[str, Any]:
        """Read a checkpoint into the objects, all of it or nothing.

        Args:
            path: what `save` returned.
            parts: which parts, as `["model/weights"]`; None for all.

        Returns:
            The values of those objects that are plain values (pytrees of arrays and numbers), which
            cannot be changed in place, by name.

        Raises:
            CheckpointMismatchError: the checkpoint is of other objects; it names every difference.
            CheckpointError: it is absent, or not as it was written.
        """
        snapshot = read_snapshot(Path(path).absolute())
        return self.parts().restore(snapshot, parts)

    read, write = restore, save


class CheckpointManager:
    """Numbered checkpoints in a directory, of which the newest are kept.

    Saving copies the state on the devices and returns; a thread writes it. Use the manager in a
    `with` block, or call `close`, so that the last one is complete and errors are seen. Of several
    workers, which all call `save`, the first writes.

    Args:
        checkpoint: what to save.
        directory: where; created.
        max_to_keep: how many are kept; None for all.
        checkpoint_name: they are called `checkpoint_name-N`.
        asynchronous: whether `save` returns before the checkpoint is on the disk.
        init_fn: called by `restore_or_initialize` where there is no checkpoint.
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
    ) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise InvalidArgumentError(
                f"`max_to_keep` must be at least 1. Received: max_to_keep={max_to_keep}. None keeps all."
            )
        self._checkpoint = checkpoint
        self.directory = Path(directory).absolute()
        self._keep, self._name, self._init = max_to_keep, checkpoint_name, init_fn
        self._asynchronous = asynchronous
        self._writer = BackgroundWriter()
        _commits.sweep(self.directory)
        self._newest = 0
        #: The last checkpoint for which not all workers have waited.
        self._unshared: str | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """What is saved."""
        return self._checkpoint

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the complete checkpoints, oldest first."""
        return [str(path) for _, path in _commits.commits(self.directory, self._name)]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest complete checkpoint, or None."""
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
        self._writer.wait()
        newest = max([self._newest, *(n for n, _ in _commits.commits(self.directory, self._name))])
        if checkpoint_number is None:
            # The first worker may have written this one before another looks for the newest.
            number = self._checkpoint.number(str(self.directory / self._name), newest + 1)
        else:
            number = int(checkpoint_number)
        self._newest = max(newest, number)
        name = f"{self._name}-{number}"
        self._unshared = str(self.directory / name)
        if self._checkpoint.is_written_here():
            snapshot = self._checkpoint.snapshot()
            self._writer.submit(lambda: self._write(name, snapshot))
        if not self._asynchronous:
            self.wait()
            self._writer.close()
        return str(self.directory / name)

    def _write(self, name: str, snapshot: Snapshot) -> None:
        write_snapshot(self.directory, name, snapshot)
        if self._keep is not None:
            for _, path in _commits.commits(self.directory, self._name)[: -self._keep]:
                _commits.delete_commit(path)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all checkpoints are on the disk.

        Args:
            timeout: seconds.

        Raises:
            CheckpointError: one could not be written, or the time is over.
        """
        self._writer.wait(timeout)
        path, self._unshared = self._unshared, None
        if path is not None:
            self._checkpoint.share(path)

    def restore_or_initialize(self) -> str | None:
        """Restore the newest checkpoint that is as it was written; a damaged one is passed over and logged.

        Returns:
            Its path; None where there is none, after `init_fn` was called.

        Raises:
            CheckpointMismatchError: the checkpoint is of other objects.
            CheckpointError: there are checkpoints and all are damaged.
        """
        self.wait()
        found = _commits.newest_good(self.directory, self._name)
        if found is None:
            if self._init is not None:
                self._init()
            return None
        snapshot = read_snapshot(found[1], checked=True)
        self._checkpoint.parts().restore(snapshot)
        return str(found[1])

    def close(self) -> None:
        """Finish writing and end the thread.

        Raises:
            CheckpointError: a checkpoint could not be written.
        """
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
            # What the block raised is the first cause, and tells more.
            if error is None:
                raise
