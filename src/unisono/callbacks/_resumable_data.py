"""The data of a `fit` with backups: where they stand, whether they are the same, how they resume.

They are compared by kinds, shapes, and hashes of first rows and batches. Data that repeat themselves (arrays,
a `unisono.data.Dataset`) must be the same. A generator or a `PyDataset` may draw random numbers of its own,
which no backup holds; there a difference is a warning.

Tests: tests/virtual/callbacks/test_resume.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import random
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from unisono._errors import CheckpointMismatchError, InvalidArgumentError
from unisono._types import ArrayLike, PyTree, State
from unisono.callbacks._fit_progress import Progress
from unisono.data._dataset import Dataset
from unisono.data._keras_input import KerasInput, KerasStream, Position, as_keras_input

_LOG = logging.getLogger("unisono")

#: Batches that Keras or a device may be ahead of the step that is saved.
_READ_AHEAD = 64
#: How many rows are hashed at the beginning of an array and how many evenly over it; and how many bytes.
_ROWS, _BYTES = 64, 8_000_000
_CONTENT = "contents"


class ResumableData:
    """The data among the arguments of `fit`.

    Args:
        arguments: of `fit`, by name; a `unisono.data.Dataset` is replaced by what Keras reads.

    Raises:
        InvalidArgumentError: `steps_per_epoch` for data in which it is not known where an epoch begins.
    """

    def __init__(self, arguments: dict[str, Any], steps_per_execution: int) -> None:
        self._arguments, self._steps_per_execution = arguments, steps_per_execution
        #: Where a `unisono.data.Dataset` stands; None for other data.
        self.position = self._find_position()
        #: The number of batches in an iteration over the data, where it goes on in the next epoch; else None.
        self.shared_size = self._find_shared_size()

    def _find_position(self) -> Position | None:
        arguments = self._arguments
        x = arguments["x"]
        if isinstance(x, Dataset):
            x = arguments["x"] = as_keras_input(x)
            # Keras shuffles the batches of a `PyDataset`; the data set has its order already.
            arguments["shuffle"] = False
        if not isinstance(x, (KerasInput, KerasStream)):
            return None
        position = x.position
        position.keep_states(_READ_AHEAD * max(1, self._steps_per_execution))
        return position

    def _find_shared_size(self) -> int | None:
        x, steps = self._arguments["x"], self._arguments["steps_per_epoch"]
        if steps is None:
            return None
        size = self._num_batches()
        if size is None and self.position is None and not isinstance(x, types.GeneratorType):
            raise InvalidArgumentError(
                "With `BackupAndRestore`, `steps_per_epoch` needs data in which it is known where an epoch "
                f"begins. Received: steps_per_epoch={steps} and {type(x).__name__}. Pass arrays, a "
                "`unisono.data.Dataset` or a `PyDataset` of known size, or leave `steps_per_epoch` out."
            )
        return size if size is not None and steps < size else None

    def _num_batches(self) -> int | None:
        """Return the number of batches in an iteration over arrays or a `PyDataset`; None for other data."""
        arguments = self._arguments
        x, batch_size = arguments["x"], arguments["batch_size"]
        if isinstance(x, keras.utils.PyDataset):
            known: int | None = x.num_batches
            return known
        rows: int | None = next((a.shape[0] for a in jax.tree.leaves(x) if getattr(a, "shape", ())), None)
        if rows is None:
            return None
        if arguments["validation_split"] and arguments["validation_data"] is None:
            rows = math.floor(rows * (1.0 - arguments["validation_split"]))
        # As Keras: without a size, the steps of an epoch are to use all rows.
        batches: float = rows / (batch_size or math.ceil(rows / arguments["steps_per_epoch"]))
        return math.ceil(batches)

    def is_inside(self, progress: Progress) -> bool:
        """Return whether an epoch continues the iteration over the data of the epoch before."""
        return self.shared_size is not None and 0 < progress.used < self.shared_size

    def facts(self) -> dict[str, Any]:
        """Return facts by which the data are compared."""
        arguments = self._arguments
        x = arguments["x"]
        arrays = [a for a in jax.tree.leaves((x, arguments["y"])) if hasattr(a, "shape")]
        weights = [a for a in jax.tree.leaves(arguments["sample_weight"]) if hasattr(a, "shape")]
        return {
            "kind": type(x).__name__,
            "shapes": [list(np.shape(a)) for a in arrays],
            "batch_size": arguments["batch_size"],
            "steps_per_epoch": arguments["steps_per_epoch"],
            "shuffle": bool(arguments["shuffle"]),
            "steps_per_execution": self._steps_per_execution,
            # Without a seed each process draws its own: `keras.utils.set_random_seed` decides it.
            "shuffle_seeds": [] if self.position is None else self.position.shuffle_seeds,
            _CONTENT: [_hash(sample) for a in (*arrays, *weights) for sample in _samples(a)],
        }

    def check_content(self, progress: Progress, directory: object) -> None:
        """Compare the data with the backup's, where they can be read without using them up.

        Raises:
            CheckpointMismatchError: they are others.
        """
        arguments = self._arguments
        if self.position is not None:
            check_dataset(self.position.dataset, progress.first_of_run, directory)
        elif not progress.batch and progress.epoch and self.shared_size is None:
            # As Keras 3.16 counts: from 1 where `fit` begins.
            epoch = progress.epoch - int(arguments["initial_epoch"])
            check_sequence(
                arguments["x"],
                arguments["shuffle"],
                progress.epoch_random["python"],
                epoch,
                progress.first_of_epoch,
            )

    def resume(self, progress: Progress) -> None:
        """Make the data continue where the backup was made."""
        x = self._arguments["x"]
        if self.position is not None:
            if self.is_inside(progress):
                self.position.resume_from(progress.data, progress.used)
            elif progress.batch or self._is_one_iteration():
                # In the middle of an iteration; otherwise the next epoch begins a new one.
                self.position.resume_from(progress.data, progress.batch)
            else:
                self.position.resume_after(progress.data)
        elif isinstance(x, types.GeneratorType):
            # The batches of the running epoch are passed over later, as with other data.
            for i in range(progress.batches - progress.batch):
                batch = next(x)
                if i == 0 and not are_same(progress.first_of_run, fingerprint(batch)):
                    warn_of_other_batch("generator")

    def _is_one_iteration(self) -> bool:
        """True if an epoch begins where the one before ended, in one iteration over the data."""
        if self.position is None or self._arguments["steps_per_epoch"] is None:
            return False
        return not self.position.is_finite

    def rewind(self) -> None:
        """Give the batches again at which Keras has only looked, to build the model."""
        if self.position is not None:
            self.position.rewind()

    def state_after(self, batches: int) -> State:
        """Return the state of the running iteration after some batches; None for other data."""
        return None if self.position is None else self.position.state_after(batches)


def check_facts(saved: Mapping[str, Any], own: Mapping[str, Any], directory: object) -> None:
    """Raise where the data are not the backup's.

    Raises:
        CheckpointMismatchError: it names the first difference.
    """
    for name, value in own.items():
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


def are_same(saved: Sequence[str], own: Sequence[str]) -> bool:
    """Return whether two fingerprints are of the same batch; Keras may have added sample weights to one."""
    return all(a == b for a, b in zip(saved, own, strict=False))


def check_dataset(dataset: Dataset, saved: Sequence[str], directory: object) -> None:
    """Raise where the first batch of a data set that can be read again is not the one of the backup.

    Raises:
        CheckpointMismatchError: it is another one, and the same each time it is read.
    """
    with contextlib.closing(dataset.as_numpy_iterator()) as iterator:
        start = iterator.get_state()
        own = fingerprint(next(iterator, ()))
        if not saved or are_same(saved, own):
            return
        iterator.set_state(start)
        if fingerprint(next(iterator, ())) == own:
            raise other_data("a data set with another first batch", directory)
    # Such as random augmentation with a generator of the program's.
    warn_of_other_batch("Dataset")


def check_sequence(x: PyTree, shuffle: bool, python_random: State, epoch: int, saved: Sequence[str]) -> None:
    """Warn where the first batch of a finished epoch over a `PyDataset` is not the trained one.

    Args:
        shuffle: whether Keras shuffles the order of the batches.
        python_random: the state of Python's generator when that epoch began, which gives the order.
        epoch: the number of that epoch, which gives the order since Keras 3.16.
        saved: the fingerprint of the first batch of that epoch; empty if it is not known.
    """
    if (
        not saved
        or not isinstance(x, keras.utils.PyDataset)
        or isinstance(x, KerasInput)
        or not x.num_batches
    ):
        return
    first = [0]
    if shuffle:
        drawn, counted = random.Random(), random.Random(epoch)
        drawn.setstate(python_random)
        first = [_shuffled(x.num_batches, generator)[0] for generator in (drawn, counted)]
    if not any(are_same(saved, fingerprint(x[i])) for i in first):
        warn_of_other_batch(type(x).__name__)


def _shuffled(count: int, generator: random.Random) -> list[int]:
    """Return the batches in the order in which Keras shuffles them."""
    order = list(range(count))
    generator.shuffle(order)
    return order


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
