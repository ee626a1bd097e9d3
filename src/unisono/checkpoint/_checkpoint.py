"""`Checkpoint`: tf.train's class, atomic, checked and flushed.

Source of the names: https://www.tensorflow.org/api_docs/python/tf/train/Checkpoint
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from unisono._context import require_cross_replica
from unisono._errors import InvalidArgumentError
from unisono._system._object_store import Place, place_of
from unisono._types import Trackable
from unisono.checkpoint._arrays import read_along
from unisono.checkpoint._contents import Parts, holds_objects
from unisono.checkpoint._restoring import Restoration, RestoreStatus
from unisono.checkpoint._series import read_snapshot, write_snapshot
from unisono.checkpoint._snapshot import Snapshot
from unisono.checkpoint._tracking import Holder, TrackedDict, TrackedList
from unisono.checkpoint.commits import _commits
from unisono.collectives._process_group import ProcessGroup, SingleProcessGroup
from unisono.training._binding import holder_of

_LOG = logging.getLogger("unisono")


class Checkpoint(Holder):
    """Objects that are saved and restored together, under any strategy and number of replicas.

    Objects are also attributes: `checkpoint.step`, `checkpoint.step = variable`. What is restored before it
    exists (a model that is not built, an optimizer's slots, an attribute that is not set) is restored when it
    is created.

    Args:
        root: one object, under the name `root`.
        **objects: Keras models (weights, random state and optimizer), layers, optimizers, metrics,
            `keras.Variable`s and `unisono.Variable`s; iterators of `unisono.data` and anything else
            with `get_state` and `set_state`; other checkpoints; lists and dicts of these; pytrees of
            arrays and numbers.

    >>> import tempfile, keras
    >>> step = keras.Variable(3, dtype="int32")
    >>> path = Checkpoint(step=step).save(tempfile.mkdtemp() + "/first")
    >>> _ = step.assign(0)
    >>> Checkpoint(step=step).restore(path), int(step.value)
    ({}, 3)
    """

    def __init__(self, root: Trackable = None, **objects: Trackable) -> None:
        super().__init__()
        self._counter = 0
        #: Directories in which a checkpoint of this object was read back.
        self._was_read: set[Place] = set()
        self._restoration: Restoration | None = None
        self._objects |= {name: _tracked(value) for name, value in objects.items()}
        if root is not None:
            self._objects["root"] = _tracked(root)

    def __getattr__(self, name: str) -> Trackable:
        # `copy` and `pickle` ask for attributes before `__init__` has made `_objects`.
        objects = vars(self).get("_objects", {})
        if name not in objects:
            raise AttributeError(f"This checkpoint has no object {name!r}; it has {sorted(objects)}.")
        return objects[name]

    def __setattr__(self, name: str, value: Trackable) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
            return
        # Python asks `__getattr__` only where the class has no such name: the object could not be read again.
        if hasattr(type(self), name):
            raise InvalidArgumentError(
                f"An object in a checkpoint must have another name than its methods. Received: {name!r}. "
                f"Write `checkpoint.{name}_ = ...`."
            )
        self._objects[name] = _tracked(value)
        self._has_grown()

    def _include(self, **objects: Trackable) -> None:
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
        self._objects |= {name: _tracked(value) for name, value in objects.items()}
        self._has_grown()

    @property
    def save_counter(self) -> int:
        """The number of the checkpoint that `save` wrote last; 0 before the first."""
        return self._counter

    def _parts(self) -> Parts:
        """The variables and states of the objects as they are now."""
        return Parts(self._objects)

    def _snapshot(self) -> Snapshot:
        """A copy of everything, which later steps do not change.

        Raises:
            InvalidArgumentError: there is nothing to save, or a model is not built.
        """
        if not self._objects:
            raise InvalidArgumentError(
                "A checkpoint must hold something. Received: no objects. Write `Checkpoint(model=model)`."
            )
        return self._parts().snapshot()

    def save(self, file_prefix: str | os.PathLike[str]) -> str:
        """Write the next checkpoint of a series; returns when it is on the disk.

        Args:
            file_prefix: the path without the number: the first is `file_prefix-1`, the next `file_prefix-2`.

        Returns:
            The path.

        Raises:
            CheckpointError: it cannot be written, or not be read back; nothing is left then.
            ContextError: inside a replica.
        """
        require_cross_replica("checkpoint.save")
        series = place_of(file_prefix)
        # The counter remembers numbers whose files were deleted, the directory earlier processes' numbers.
        newest = max(self._counter, _commits.newest_number(series.parent, series.name))
        number = self._number(str(series), newest + 1)
        path = self.write(str(series.with_name(f"{series.name}-{number}")))
        # Not before: a save that failed does not use up its number.
        self._counter = number
        return path

    def write(self, file_prefix: str | os.PathLike[str]) -> str:
        """Write a checkpoint at exactly this path; returns when it is on the disk.

        Args:
            file_prefix: a directory that does not exist yet, or an earlier checkpoint, which is replaced.

        Returns:
            The path.

        Raises:
            CheckpointError: another directory, cannot be written, or not be read back; what was there stays.
        """
        target = place_of(file_prefix)
        if self._is_written_here():
            # Once per directory: what a file system does not give back is noticed at the first save.
            read_back = target.parent not in self._was_read
            write_snapshot(target.parent, target.name, self._snapshot(), read_back=read_back, replaces=True)
            self._was_read.add(target.parent)
        else:
            self._read_along()
        self._share(str(target))
        return str(target)

    def _read_along(self) -> None:
        """Read, on a worker that does not write, what all must read together; the first one writes it."""
        read_along(self._parts().shared())

    def _is_written_here(self) -> bool:
        """True if this process writes: of several workers the first does, for all."""
        return self._group().is_chief

    def _share(self, path: str) -> None:
        """Wait, on all workers but the first, until the first has written a checkpoint.

        Args:
            path: of the checkpoint.
        """
        self._group().share_file(path)

    def _number(self, series: str, number: int) -> int:
        """Return the number of the next checkpoint of a series, the same on all workers.

        Args:
            series: the path without the number.
            number: what this worker would choose.
        """
        return self._group().checkpoint_number(series, number)

    def _group(self) -> ProcessGroup:
        """Return the processes that hold what is saved; this one alone where they are not several."""
        holders = (holder_of(variable) for variable in self._parts().variables.values())
        groups = (strategy.process_group for strategy in holders if strategy is not None)
        return max(groups, key=lambda group: group.size, default=SingleProcessGroup())

    def restore(
        self, save_path: str | os.PathLike[str] | None, parts: Sequence[str] | None = None
    ) -> RestoreStatus:
        """Read a checkpoint into the objects: all that exist at once, or none; others when they are created.

        Args:
            save_path: what `save` returned; with None, nothing is restored, and a line says so.
            parts: which parts, as `["model/weights"]`; None for all.

        Returns:
            The values of those objects that are plain values (pytrees of arrays and numbers), which
            cannot be changed in place, by name. It has TensorFlow's `assert_consumed`, `expect_partial` and
            so on.

        Raises:
            CheckpointMismatchError: the checkpoint is of other objects; it names every difference.
            CheckpointError: it is absent, or not as it was written.
        """
        if save_path is None:
            _LOG.warning(
                "Nothing is restored: restore(None). That is right where training begins. To continue, pass "
                "what `save` returned, or `latest_checkpoint(directory)` of its directory."
            )
            return RestoreStatus({}, None)
        path = place_of(save_path)
        if isinstance(path, Path) and not path.exists():
            # A process may have died while it was replacing it.
            _commits.sweep(path.parent)
        return self._put(read_snapshot(path), str(path), parts)

    def _put(self, snapshot: Snapshot, path: str, parts: Sequence[str] | None = None) -> RestoreStatus:
        """Restore what was read already.

        Args:
            snapshot: the contents.
            path: where they were, for messages.
            parts: as for `restore`.

        Raises:
            CheckpointMismatchError: as `restore`.
        """
        restoration = Restoration(self, snapshot, parts, path)
        # Before the earlier restoration is given up: where this one raises, that one continues.
        values = restoration.begin()
        if self._restoration is not None:
            self._restoration.cancel()
        self._restoration = restoration
        return RestoreStatus(values, restoration)

    # TensorFlow's `read` differs only in not expecting a `save_counter`; no checkpoint here has one.
    read = restore


def _tracked(value: Trackable) -> Trackable:
    """Return a list or dict in a form that reports its growth, if it holds objects or may hold them later."""
    for kind, tracked in ((list, TrackedList), (dict, TrackedDict)):
        # Not subclasses: a copy as a tracked list or dict would lose what they do.
        if type(value) is kind and (not value or holds_objects(value)):
            return tracked(value)
    return value
