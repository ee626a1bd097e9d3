"""The data of a `fit` with backups: where they stand, whether they are the same, how they resume.

Tests: tests/virtual/callbacks/test_resume.py.
"""

from __future__ import annotations

import math
import types
from typing import Any

import jax
import keras

from unisono._errors import InvalidArgumentError
from unisono._types import State
from unisono.callbacks._data import (
    are_same,
    check_dataset,
    check_sequence,
    facts_of,
    fingerprint,
    warn_of_other_batch,
)
from unisono.callbacks._fit_progress import Progress
from unisono.data._dataset import Dataset
from unisono.data._keras_input import KerasInput, KerasStream, Position, as_keras_input

#: Batches that Keras or a device may be ahead of the step that is saved.
_READ_AHEAD = 64


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
        """Return what the data look like."""
        return facts_of(self._arguments, self._steps_per_execution, self.position)

    def check_content(self, progress: Progress, directory: object) -> None:
        """Compare the data with those of the backup, where they can be read without using them up.

        Raises:
            CheckpointMismatchError: they are others.
        """
        arguments = self._arguments
        if self.position is not None:
            check_dataset(self.position.dataset, progress.first_of_run, directory)
        elif not progress.batch and progress.epoch and self.shared_size is None:
            check_sequence(
                arguments["x"], arguments["shuffle"], progress.epoch_random["python"], progress.first_of_epoch
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
            # The batches of the running epoch are passed over later, like those of other data.
            for i in range(progress.batches - progress.batch):
                batch = next(x)
                if i == 0 and not are_same(progress.first_of_run, fingerprint(batch)):
                    warn_of_other_batch("generator")

    def _is_one_iteration(self) -> bool:
        """Whether an epoch begins where the one before ended, in one iteration over the data."""
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
