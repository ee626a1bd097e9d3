"""The contents of a directory of checkpoints and of one checkpoint, without the objects.

Tests: tests/virtual/checkpoint/test_checkpoint.py.
"""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np

from unisono._errors import CheckpointError
from unisono._system._object_store import place_of
from unisono.checkpoint._contents import names_in
from unisono.checkpoint._series import read_snapshot
from unisono.checkpoint._writer import settle
from unisono.checkpoint.commits._commits import manifests, reached
from unisono.checkpoint.commits._manifests import MANIFEST


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest complete checkpoint in a directory, or None where there is none.

    Args:
        checkpoint_dir: a directory; it need not exist. Of several series, that which was written to last
            counts. A checkpoint that this process is writing is waited for.

    Raises:
        CheckpointError: the directory cannot be read.

    >>> latest_checkpoint("/tmp/there is no such directory") is None
    True
    """
    directory = place_of(checkpoint_dir)
    settle(directory)
    try:
        with reached(directory):
            stats = manifests(directory)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"The directory of checkpoints must be readable. Received: {error}. Pass another one."
        ) from error
    newest: dict[str, tuple[int, int, str]] = {}
    for name, stat in stats.items():
        # Within a series the number decides; a name without one is of `Checkpoint.write`.
        series, number = re.sub(r"-\d+$", "", name), re.search(r"-(\d+)$", name)
        # Not the directory's own time, which changes with everything that is put into it.
        entry = (int(number[1]) if number else 0, stat.st_mtime_ns, name)
        newest[series] = max(newest.get(series, entry), entry)
    last = max(newest.values(), key=lambda entry: entry[1], default=None)
    return None if last is None else str(directory / last[2])


class CheckpointReader:
    """The arrays of a checkpoint by name: tf.train's class of this name.

    Args:
        path: of the checkpoint.

    Raises:
        CheckpointError: it is absent, or not as it was written.

    >>> import tempfile
    >>> import keras
    >>> from unisono.checkpoint import Checkpoint
    >>> path = Checkpoint(step=keras.Variable(7.0)).save(tempfile.mkdtemp() + "/ckpt")
    >>> reader = CheckpointReader(path)
    >>> [float(reader.get_tensor(name)) for name in reader.get_variable_to_shape_map() if "step" in name]
    [7.0]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        snapshot = read_snapshot(place_of(path))
        arrays = snapshot.on_host()
        self._arrays = {name: arrays[name] for name in sorted(names_in(snapshot, arrays) & set(arrays))}

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """The shape of each variable."""
        return {name: list(array.shape) for name, array in self._arrays.items()}

    def get_variable_to_dtype_map(self) -> dict[str, Any]:
        """The data type of each variable."""
        return {name: array.dtype for name, array in self._arrays.items()}

    def has_tensor(self, name: str) -> bool:
        """Return whether there is a variable of this name."""
        return name in self._arrays

    def get_tensor(self, name: str) -> np.ndarray:
        """Return a variable.

        Args:
            name: one of `get_variable_to_shape_map()`.

        Raises:
            CheckpointError: there is none of this name.
        """
        if name not in self._arrays:
            raise CheckpointError(
                f"A checkpoint must hold what is read. Received: {name!r}; it has {sorted(self._arrays)}."
            )
        return np.asarray(self._arrays[name])


def load_checkpoint(ckpt_dir_or_file: str | os.PathLike[str]) -> CheckpointReader:
    """Return a reader of a checkpoint, or of the newest one in a directory.

    Args:
        ckpt_dir_or_file: path of a checkpoint, or of a directory of checkpoints.

    Raises:
        CheckpointError: there is none, or it is not as it was written.

    >>> load_checkpoint("/tmp/there is no such directory")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    unisono.CheckpointError: A checkpoint must exist to be restored. ...
    """
    path = place_of(ckpt_dir_or_file)
    newest = None if (path / MANIFEST).is_file() else latest_checkpoint(str(path))
    return CheckpointReader(newest or str(path))


def list_variables(ckpt_dir_or_file: str | os.PathLike[str]) -> list[tuple[str, list[int]]]:
    """Return the names and shapes of the variables in a checkpoint.

    Args:
        ckpt_dir_or_file: path of a checkpoint, or of a directory of checkpoints.

    Raises:
        CheckpointError: there is none, or it is not as it was written.

    >>> import tempfile
    >>> from unisono.checkpoint import Checkpoint
    >>> import keras
    >>> list_variables(Checkpoint(w=keras.Variable([1.0, 2.0])).save(tempfile.mkdtemp() + "/ckpt"))
    [('w', [2])]
    """
    return list(load_checkpoint(ckpt_dir_or_file).get_variable_to_shape_map().items())
