"""The contents of a directory of checkpoints, and the model's variables out of one of them.

`unisono.checkpoint` and `BackupAndRestore` write commits; Keras' `ModelCheckpoint` writes files,
`.keras` and `.weights.h5`.

Tests: tests/virtual/test_evaluator.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import jax.numpy as jnp
import keras
import numpy as np

from unisono._errors import CheckpointError, CheckpointMismatchError
from unisono._system._object_store import ObjectStat, Place, StorePath
from unisono.checkpoint._contents import Parts, weights_by_path
from unisono.checkpoint._series import read_snapshot
from unisono.checkpoint.commits._manifests import MANIFEST
from unisono.checkpoint.commits._uploads import manifests
from unisono.evaluator._checkpoint_selection import CheckpointEntry

_WEIGHTS = "/weights/"
_COUNTER = "iteration"
_KERAS, _H5 = ".keras", ".weights.h5"
_H5_IN_KERAS = "model.weights.h5"
_OPTIMIZER = "optimizer/"
#: Where Keras keeps an optimizer's counter in its files; the first in a `LossScaleOptimizer`'s.
_H5_COUNTERS = ("optimizer/inner_optimizer/vars/0", "optimizer/vars/0")

#: A variable's shape and dtype, or where only that is known, its shape.
Description = Mapping[str, str]


def list_checkpoints(directory: Place) -> tuple[CheckpointEntry, ...]:
    """Return the checkpoints of a directory; a deleted one may be missing.

    Raises:
        OSError: an object store does not answer.
    """
    if isinstance(directory, StorePath):
        names = directory.children().items()
        files = {n: s for n, s in names if s is not None and n[0] != "." and n.endswith((_KERAS, _H5))}
        stats = {**manifests(directory), **files}
        return tuple(_entry(name, stats[name], name in files) for name in sorted(stats))
    try:
        paths = [p for p in directory.iterdir() if not p.name.startswith(".")]
    except FileNotFoundError:
        return ()
    return tuple(found for path in sorted(paths) if (found := _found(path)) is not None)


def _found(path: Path) -> CheckpointEntry | None:
    is_file = path.name.endswith((_KERAS, _H5))
    try:
        stat = (path if is_file and path.is_file() else path / MANIFEST).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _entry(path.name, stat, is_file)


def _entry(name: str, stat: os.stat_result | ObjectStat, is_file: bool) -> CheckpointEntry:
    stem = name.removesuffix(_KERAS).removesuffix(_H5) if is_file else name
    # `weights.03-0.95.keras` is of epoch 3: numbers with a point are losses.
    numbers = re.findall(r"\d+", re.sub(r"\d+\.\d+", "", stem))
    number = int(numbers[-1]) if numbers else None
    signature = f"{stat.st_mtime_ns}-{stat.st_size}"
    # Some stores date objects by the second.
    signature += stat.tag if isinstance(stat, ObjectStat) else ""
    is_atomic = not is_file or isinstance(stat, ObjectStat)
    return CheckpointEntry(name, re.sub(r"\d+$", "", name), number, stat.st_mtime_ns, signature, is_atomic)


class Restorer:
    """Puts the variables of checkpoints into a model, and nothing else of them.

    Args:
        model: built; its optimizer may be another than in training.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._in_files: Description | None = None

    def restore(self, path: Place) -> int:
        """Put a checkpoint into the model.

        Returns:
            How many batches the optimizer had seen, 0 where the checkpoint does not say.

        Raises:
            CheckpointMismatchError: it is of another model; it names every variable that differs.
            CheckpointError: it is damaged, or was deleted while it was read.
        """
        is_file = path.name.endswith((_KERAS, _H5))
        return self._restore_file(path) if is_file else self._restore_commit(path)

    def _restore_commit(self, path: Place) -> int:
        with _reading(path):
            snapshot = read_snapshot(path)
        own = weights_by_path(self._model)
        described = {n: _text(v.shape, v.dtype) for n, v in own.items()}
        parts = parts_with_weights(snapshot.arrays)
        part = _part_of(parts, described, path)
        _require_same(described, parts[part], path)
        variables = {f"{part}{_WEIGHTS}{n}": v for n, v in own.items()}
        Parts(variables).restore(snapshot, [f"{part}{_WEIGHTS}"])
        return _iterations(snapshot.arrays, part)

    def _restore_file(self, path: Place) -> int:
        with tempfile.TemporaryDirectory() as folder:
            # A copy stays as it is, whatever training writes and deletes.
            copy = Path(folder) / f"copy{_H5}"
            with _reading(path):
                _copy_weights(path, copy)
                described, iterations = _described(copy)
            # Once: the names and shapes of the own model do not change.
            if self._in_files is None:
                self._in_files = self._described_in_files(Path(folder))
            _require_same(self._in_files, described, path)
            with _reading(path):
                keras.saving.load_weights(self._model, str(copy), objects_to_skip=self._left_alone())
        return iterations

    def _described_in_files(self, folder: Path) -> Description:
        """Return the description of Keras' file of this model."""
        own = folder / f"own{_H5}"
        keras.saving.save_weights(self._model, str(own), objects_to_skip=self._left_alone())
        return _described(own)[0]

    def _left_alone(self) -> list[keras.Variable]:
        optimizer = getattr(self._model, "optimizer", None)
        # An evaluator may be compiled with another optimizer: its variables are neither compared nor loaded.
        return [] if optimizer is None else [optimizer]


@contextlib.contextmanager
def _reading(path: Place) -> Iterator[None]:
    """Translate the many ways in which what was cut, changed or deleted cannot be read."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile) as error:
        # First, because a deletion in the middle of reading shows as any of these errors.
        if not path.exists():
            raise CheckpointError(
                f"A checkpoint must stay while it is read. Received: {path}, which was deleted. "
                "Keep more of them, for an evaluator that is slower than training."
            ) from error
        # `CheckpointError` is itself an `OSError`: it says already what is wrong.
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"A checkpoint must be as it was written. Received: {path}, which cannot be read ({error})."
        ) from error


def _text(shape: Iterable[int], dtype: Any = None) -> str:
    return f"shape {tuple(shape)}" + ("" if dtype is None else f" {jnp.dtype(dtype)}")


def parts_with_weights(arrays: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the models in a checkpoint: name -> variable -> what it is.

    >>> parts_with_weights({"model/weights/kernel": np.zeros(2, "f4"), "step": np.int32(3)})
    {'model': {'kernel': 'shape (2,) float32'}}
    """
    parts: dict[str, dict[str, str]] = {}
    for name, array in arrays.items():
        part, separator, variable = name.partition(_WEIGHTS)
        if separator:
            parts.setdefault(part, {})[variable] = _text(array.shape, array.dtype)
    return parts


def _part_of(parts: Mapping[str, Description], own: Description, path: Place) -> str:
    """The name under which training has saved the model."""
    fitting = [name for name, described in parts.items() if dict(described) == dict(own)]
    # The usual name first, then the only model there is, and last the only fitting one.
    for names in (["model"] if "model" in parts else [], list(parts), fitting):
        if len(names) == 1:
            return names[0]
    received = f"the models {', '.join(sorted(parts))}" if parts else "no model"
    raise CheckpointMismatchError(
        f"An evaluator needs to know which model of a checkpoint is its own. Received: {path} with "
        f"{received}. Save it as `Checkpoint(model=model, ...)`."
    )


def _require_same(own: Description, saved: Description, path: Place) -> None:
    problems = [f"missing in the checkpoint: {n}" for n in sorted(own.keys() - saved.keys())]
    problems += [f"only in the checkpoint: {n}" for n in sorted(saved.keys() - own.keys())]
    for name in sorted(own.keys() & saved.keys()):
        if own[name] != saved[name]:
            problems.append(f"{name} has {own[name]}, in the checkpoint {saved[name]}")
    if problems:
        raise CheckpointMismatchError(
            f"An evaluator's model must be built like the one that trains. Received, at {path}:\n  "
            + "\n  ".join(problems)
            + "\nBuild both by the same lines, or watch the directory of the other model."
        )


def _iterations(arrays: Mapping[str, Any], part: str) -> int:
    """The counter of the model's optimizer, or the highest of others; 0 where there is none."""
    counters = [n for n in arrays if n.rpartition("/")[2] == _COUNTER and _WEIGHTS not in n]
    values = {n: int(np.asarray(arrays[n])) for n in counters}
    own = max((v for n, v in values.items() if n.startswith(f"{part}/")), default=0)
    # In a loop of one's own, another optimizer may train the model.
    return own or max(values.values(), default=0)


def _copy_weights(path: Place, copy: Path) -> None:
    """Copy a file's weights; of a file that is changed meanwhile the copy is of no use."""
    if isinstance(path, StorePath):
        path.parent.download_below(copy.parent, [path.name])
        path = copy.with_name(path.name)
    before = os.stat(path)
    if path.name.endswith(_KERAS):
        with (
            zipfile.ZipFile(path) as archive,
            archive.open(_H5_IN_KERAS) as source,
            copy.open("wb") as target,
        ):
            shutil.copyfileobj(source, target)
    else:
        shutil.copyfile(path, copy)
    after = os.stat(path)
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
        raise CheckpointError(f"A checkpoint must not change while it is read. Received: {path}.")


def _described(file: Path) -> tuple[dict[str, str], int]:
    """The variables of a file and the optimizer's counter."""
    shapes: dict[str, str] = {}
    with h5py.File(file, "r") as h5:

        def note(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset) and not name.startswith(_OPTIMIZER):
                shapes[name] = _text(item.shape)

        h5.visititems(note)
        counters = [h5[name] for name in _H5_COUNTERS if name in h5]
        iterations = [int(c[()]) for c in counters if c.shape == () and c.dtype.kind in "iu"]
    return shapes, next(iter(iterations), 0)
