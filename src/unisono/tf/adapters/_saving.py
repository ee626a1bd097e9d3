"""Checkpoints and saved models with TensorFlow's names and arguments.

Tests: tests/unit/tf/test_saving.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras

from unisono._errors import InvalidArgumentError
from unisono._saved._directory import SERVING, load, save
from unisono.checkpoint._checkpoint import Checkpoint
from unisono.checkpoint._manager import CheckpointManager
from unisono.checkpoint._reader import latest_checkpoint as newest_commit

#: Endings of Keras' own files; all other paths are directories, as in TensorFlow 2.
_FILES = (".keras", ".h5", ".hdf5")


class CheckpointManagerV2(CheckpointManager):
    """Numbered checkpoints in a directory, as `tf.train.CheckpointManager` keeps them.

    `save` returns when the checkpoint is complete. Of several workers the first writes; the directory is
    there on each of them afterwards, for programs that delete what the others have written.

    Args:
        checkpoint: what to save.
        directory: where.
        max_to_keep: how many are kept; None for all.
        keep_checkpoint_every_n_hours: is not used: nothing more is kept.
        checkpoint_name: of the files.
        step_counter: a variable with the number of the step, for `checkpoint_interval`.
        checkpoint_interval: how many steps lie between two checkpoints; `save` does nothing before.
        init_fn: called by `restore_or_initialize` where there is no checkpoint.

    Raises:
        InvalidArgumentError: an interval without a counter of steps.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], Any] | None = None,
    ) -> None:
        if checkpoint_interval is not None and step_counter is None:
            raise InvalidArgumentError(
                "`checkpoint_interval` counts the steps of `step_counter`. Received: "
                f"checkpoint_interval={checkpoint_interval}, step_counter=None."
            )
        super().__init__(
            checkpoint,
            directory,
            max_to_keep,
            checkpoint_name=checkpoint_name,
            asynchronous=False,
            init_fn=init_fn,
        )
        self.checkpoint_interval, self._counter = checkpoint_interval, step_counter
        self._last_step: int | None = None

    def save(  # type: ignore[override]  # None between two intervals, as in TensorFlow
        self,
        checkpoint_number: Any = None,
        check_interval: bool = True,
        options: object = None,
    ) -> str | None:
        """Save everything as it is now.

        Args:
            checkpoint_number: such as the step; the next number if None.
            check_interval: whether nothing is saved before `checkpoint_interval` steps have passed.
            options: is not used.

        Returns:
            The path, or None where nothing was saved.
        """
        if self.checkpoint_interval is not None:
            step = int(self._counter)
            last = self._last_step
            if check_interval and last is not None and step - last < self.checkpoint_interval:
                return None
            self._last_step = step
        path = super().save(None if checkpoint_number is None else int(checkpoint_number))
        self.directory.mkdir(parents=True, exist_ok=True)
        return path


def latest_checkpoint(
    checkpoint_dir: str | os.PathLike[str], latest_filename: str | None = None
) -> str | None:
    """Return the newest checkpoint of a directory, or the newest of Keras' files there, or None.

    Args:
        checkpoint_dir: the directory.
        latest_filename: is not used.
    """
    found = newest_commit(checkpoint_dir)
    if found is not None or not os.path.isdir(checkpoint_dir):
        return found
    # What `ModelCheckpoint` writes.
    files = [path for path in Path(checkpoint_dir).iterdir() if path.name.endswith(_FILES)]
    return str(max(files, key=lambda path: (path.stat().st_mtime_ns, path.name))) if files else None


def save_model(obj: object, export_dir: str, signatures: object = None, options: object = None) -> None:
    """Write a model or module to a directory, as `tf.saved_model.save` does.

    Args:
        obj: a model of Keras; a `tf.Module`, whose functions are saved for the calls that were made of them.
        export_dir: the directory.
        signatures: functions for given shapes, by name, or one of them.
        options: are not used.

    Raises:
        InvalidArgumentError: a signature is no function for given shapes.
        UnsupportedError: the object is none of these.
    """
    named = signatures if isinstance(signatures, Mapping) else {SERVING: signatures}
    save(obj, export_dir, {} if signatures is None else named)


def load_model(export_dir: str, tags: object = None, options: object = None) -> Any:
    """Load what `save_model` or `Model.save` wrote to a directory.

    Args:
        export_dir: the directory.
        tags: are not used.
        options: are not used.

    Returns:
        For a module, an object with its functions and variables. Of a model, the Keras model, with
        `signatures["serving_default"]`, a function that returns a dict; of a class that is not known here the
        inference alone.
    """
    return load(export_dir)


def save_to_directory(model: keras.Model, filepath: Any) -> bool:
    """Write a model to a path without an ending, as TensorFlow 2 does; return whether it is such a path."""
    path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
    if not path or "://" in path or path.endswith(_FILES):
        return False
    if not model.built:
        raise InvalidArgumentError(
            f"A model is saved when it has its variables. Received: {model.name!r}, which was never called. "
            "Call it, or `fit` it, first."
        )
    save(model, path)
    return True


def weights_file(filepath: Any) -> Any:
    """Return the path of a file of weights, with the ending that Keras 3 demands.

    >>> weights_file("checkpoints/best")
    'checkpoints/best.weights.h5'
    """
    path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
    # What is there is read as it is; `.json` describes several files.
    if not path or path.endswith((".weights.h5", ".keras", ".json")) or os.path.exists(path):
        return filepath
    return f"{path.removesuffix('.h5')}.weights.h5"
