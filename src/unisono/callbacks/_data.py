"""Whether `fit` gets the data that it got before: kinds, shapes, and hashes of first rows and batches.

Data that repeat themselves (arrays, a `unisono.data.Dataset`) must be the same. A generator or a `PyDataset`
may draw random numbers of its own, which no backup holds; there a difference is a warning.

Tests: tests/virtual/callbacks/test_resume.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from unisono._errors import CheckpointMismatchError
from unisono._types import ArrayLike, PyTree, State
from unisono.data._dataset import Dataset
from unisono.data._keras_input import KerasInput, Position

_LOG = logging.getLogger("unisono")

#: How many rows are hashed at the beginning of an array and how many evenly over it; and how many bytes.
_ROWS, _BYTES = 64, 8_000_000
_CONTENT = "contents"


def facts_of(
    arguments: Mapping[str, Any], steps_per_execution: int, position: Position | None
) -> dict[str, Any]:
    """Return what the data of `fit` look like."""
    x = arguments["x"]
    arrays = [a for a in jax.tree.leaves((x, arguments["y"])) if hasattr(a, "shape")]
    weights = [a for a in jax.tree.leaves(arguments["sample_weight"]) if hasattr(a, "shape")]
    return {
        "kind": type(x).__name__,
        "shapes": [list(np.shape(a)) for a in arrays],
        "batch_size": arguments["batch_size"],
        "steps_per_epoch": arguments["steps_per_epoch"],
        "shuffle": bool(arguments["shuffle"]),
        "steps_per_execution": steps_per_execution,
        # Without a seed each process draws its own: `keras.utils.set_random_seed` decides it.
        "shuffle_seeds": [] if position is None else position.shuffle_seeds,
        _CONTENT: [_hash(sample) for a in (*arrays, *weights) for sample in _samples(a)],
    }


def check_facts(saved: Mapping[str, Any], found: Mapping[str, Any], directory: object) -> None:
    """Raise where the data are not those of the backup.

    Raises:
        CheckpointMismatchError: it names the first difference.
    """
    for name, value in found.items():
        # Backups of earlier versions have no hashes.
        if name == _CONTENT and name not in saved:
            continue
        if saved.get(name) != value:
            received = f"{name}={value!r}, before {saved.get(name)!r}"
            if name == _CONTENT:
                received = "arrays of the same shapes with other values"
            raise other_data(received, directory)


def other_data(received: str, directory: object) -> CheckpointMismatchError:
    """Return the error for other data than before."""
    return CheckpointMismatchError(
        "`fit` must get the same data as when the backup was made, or batches would be left out or used "
        f"twice. Received: {received}. Pass the same, or delete {directory} to start from scratch."
    )


def fingerprint(batch: PyTree) -> list[str]:
    """Return a hash for each array of a batch.

    >>> fingerprint((np.zeros(2), {"a": np.ones(3)})) == fingerprint((np.zeros(2), np.ones(3)))
    True
    """
    return [_hash(leaf) for leaf in jax.tree.leaves(batch)]


def are_same(saved: Sequence[str], found: Sequence[str]) -> bool:
    """Whether two fingerprints are of the same batch; Keras may have added sample weights to one."""
    return all(a == b for a, b in zip(saved, found, strict=False))


def check_dataset(dataset: Dataset, saved: Sequence[str], directory: object) -> None:
    """Raise where the first batch of a data set that can be read again is not the one of the backup.

    Args:
        saved: the fingerprint of the first batch that was trained; empty if it is not known.

    Raises:
        CheckpointMismatchError: it is another one, and the same each time it is read.
    """
    with contextlib.closing(dataset.as_numpy_iterator()) as iterator:
        start = iterator.get_state()
        found = fingerprint(next(iterator, ()))
        if not saved or are_same(saved, found):
            return
        iterator.set_state(start)
        if fingerprint(next(iterator, ())) == found:
            raise other_data("a data set with another first batch", directory)
    # Such as random augmentation with a generator of the program's.
    warn_of_other_batch("Dataset")


def check_sequence(x: PyTree, shuffle: bool, python_random: State, saved: Sequence[str]) -> None:
    """Warn where the first batch of a finished epoch over a `PyDataset` is not the one that was trained.

    Args:
        shuffle: whether Keras shuffles the order of the batches.
        python_random: the state of Python's generator when that epoch began.
        saved: the fingerprint of the first batch of that epoch; empty if it is not known.
    """
    if (
        not saved
        or not isinstance(x, keras.utils.PyDataset)
        or isinstance(x, KerasInput)
        or not x.num_batches
    ):
        return
    order = list(range(x.num_batches))
    if shuffle:
        generator = random.Random()
        generator.setstate(python_random)
        generator.shuffle(order)
    if not are_same(saved, fingerprint(x[order[0]])):
        warn_of_other_batch(type(x).__name__)


def warn_of_other_batch(kind: str) -> None:
    """Say that data which may draw random numbers of their own are others than before."""
    _LOG.warning(
        "A batch of the %s is not the one that was trained before the backup was made. If the data are "
        "others, batches are left out or used twice: pass the same, or start from scratch in another "
        "directory. If they draw random numbers of their own, this is expected; draw them from `random` or "
        "`numpy.random`, whose state a backup holds, to continue exactly.",
        kind,
    )


def _samples(array: ArrayLike) -> list[ArrayLike]:
    """The first rows of an array, and rows from all over it."""
    rows = int(np.shape(array)[0]) if np.ndim(array) else 0
    if not rows:
        return []
    size = max(1, np.asarray(array[:1]).nbytes)
    count = max(1, min(_ROWS, _BYTES // size))
    return [array[:count], array[:: max(1, -(-rows // count))]]


def _hash(value: ArrayLike) -> str:
    array = np.ascontiguousarray(value)
    # Arrays of objects, such as strings, are hashed as text: their bytes are addresses.
    data = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()
