"""Adapters of a data set for Keras' own `fit`, `evaluate` and `predict`.

Tests: tests/unit/data/test_dataset_keras.py, tests/virtual/training/test_keras_data.py.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grain
import keras
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono.data._batches import check_batched, check_values, empty
from unisono.data._dataset import Dataset
from unisono.data._pipeline._cardinality import INFINITE, UNKNOWN
from unisono.data._pipeline._plan import PipelineIterator
from unisono.data._pipeline._structure import Element, map_leaves
from unisono.data._rewrite import shuffle_seeds

if TYPE_CHECKING:
    from unisono.data._row_numbers import RowPipeline


def as_keras_input(dataset: Dataset, keep_states: int = 0) -> KerasInput | KerasStream:
    """Return the adapter to pass to Keras instead of a data set, together with `shuffle=False`.

    Keras also accepts a data set itself, because it is a `grain.IterDataset`. But then Keras does not know
    the number of batches, rejects `class_weight`, and starts an extra iteration to inspect two batches.

    Args:
        dataset: A data set of batches.
        keep_states: Number of last batches after which the state is kept.

    Returns:
        A `keras.utils.PyDataset`; for a data set of unknown size, a `grain.IterDataset`.

    >>> from unisono.data import Dataset
    >>> as_keras_input(Dataset.range(10).batch(4)).num_batches
    3
    """
    # A `PyDataset` must name its number of batches, or be infinite.
    if dataset.cardinality() == UNKNOWN:
        return KerasStream(dataset, keep_states)
    return KerasInput(dataset, keep_states)


class Position:
    """The position in a data set over several iterations, and the states from which they can be resumed."""

    def __init__(self, dataset: Dataset, keep_states: int) -> None:
        self._dataset = self._read = dataset
        self._iterator: PipelineIterator | None = None
        # A state, and the number of batches before it that are replaced by placeholders.
        self._start: tuple[dict[str, Any], int] | None = None
        self._restored: tuple[dict[str, Any], int] | None = None
        self._ended = False
        self._placeholder: Element = None
        self._held: list[Element] = []
        #: True until a batch is read in this iteration.
        self._is_first = True
        # Several, because `fit` reads batches ahead of the step whose state a backup asks for.
        self._states: deque[tuple[int, dict[str, Any]]] = deque(maxlen=keep_states)
        self.given = 0
        self.iterations = 0

    @property
    def dataset(self) -> Dataset:
        """The data set."""
        return self._dataset

    @property
    def is_finite(self) -> bool:
        """True if an iteration has a known number of batches."""
        return self._dataset.cardinality() >= 0

    @property
    def shuffle_seeds(self) -> list[int]:
        """The seeds of the order of the batches."""
        return shuffle_seeds(self._dataset)

    def read_instead(self, dataset: Dataset) -> None:
        """Give the elements of another data set from the next iteration on.

        Args:
            dataset: of the same plan but for its source, so that both have the same states.
        """
        self._read = dataset

    def keep_states(self, number: int) -> None:
        """Keep the states after the last `number` batches."""
        self._states = deque(self._states, maxlen=number)

    def begin(self, looked_only: bool) -> None:
        """Begin the next iteration.

        Args:
            looked_only: Whether Keras started the previous iteration only to inspect its first batches.
        """
        if looked_only and not self._ended:
            self.rewind()
        if self._iterator is not None:
            self._iterator.close()
        # Before a state is restored: `iter` counts the pass, and `set_state` then sets its number.
        self._iterator = self._read.as_numpy_iterator()
        self._held, self._ended, self.given = [], False, 0
        self._states.clear()
        self.iterations += 1
        restored, self._restored = self._restored, None
        if restored is not None:
            self._iterator.set_state(restored[0])
        self._start = restored or (self._iterator.get_state(), 0)
        # The data may be at their end in a state.
        self._is_first = restored is None
        if self._start[1]:
            # Keras counts and skips the batches that were used before the state. Return copies of the next
            # batch for them, so that nothing is read twice.
            try:
                self._placeholder = self._next()
                self._held = [self._placeholder]
            except StopIteration:
                # All batches were used. Keras still has to find the end if the size is unknown.
                self._placeholder = _zeros(self._read.element_spec)
                self._ended = False

    def rewind(self) -> None:
        """Make the next iteration start where this one did, which Keras started only to inspect a batch."""
        if self._restored is None:
            self._restored = self._start

    def _next(self) -> Element:
        if self._iterator is None:
            raise InvalidArgumentError(
                "The batches of a Dataset must be read in order. Received: a batch before the first. "
                "Write fit(..., shuffle=False)."
            )
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._ended = True
            if self._is_first and self._start is not None and not self._start[1]:
                raise empty(f"{self._dataset!r}, which has no batch") from None
            raise
        if self._is_first:
            # Only the first batch: to check the range of integers reads all of them.
            self._is_first = False
            check_values(batch)
            check_batched(batch, strict=True)
        return batch

    def next(self) -> Element:
        """Return the next batch."""
        if self._start is not None and self.given < self._start[1]:
            self.given += 1
            return self._placeholder
        batch = self._held.pop() if self._held else self._next()
        self.given += 1
        if self._states.maxlen and self._iterator is not None:
            self._states.append((self.given, self._iterator.get_state()))
        return batch

    def state_after(self, batches: int) -> dict[str, Any]:
        """Return the state after a batch of this iteration, even if Keras has read ahead since."""
        if self._start is not None and batches == self._start[1]:
            return self._start[0]
        for given, state in self._states:
            if given == batches:
                return state
        raise InvalidArgumentError(
            f"The state must be that after one of the last {self._states.maxlen} batches. "
            f"Received: batches={batches}, after {self.given} were read. "
            "Write as_keras_input(dataset, keep_states=64)."
        )

    def resume_from(self, state: dict[str, Any], used: int = 0) -> None:
        """Make the next iteration resume from a state; later iterations are complete again.

        Args:
            used: Number of batches of the iteration before the state. Placeholders are returned for them, for
                a caller that counts and skips them.
        """
        self._restored = state, used

    def resume_after(self, state: dict[str, Any]) -> None:
        """Make the next iteration the one after the iteration that a state belongs to."""
        # To set a state also sets the number of the pass, from which the next `iter` counts on.
        iterator = self._dataset.as_numpy_iterator()
        iterator.set_state(state)
        iterator.close()


def _zeros(spec: Element) -> Element:
    """Return a batch of zeros for a spec, with one row where the number of rows varies."""
    return map_leaves(lambda s: np.zeros([size or 1 for size in s.shape], s.dtype), spec)


class KerasInput(keras.utils.PyDataset):
    """The batches of a data set of known size.

    Keras requests batch 0, 1, ... of each iteration; batch 0 starts the next one.
    """

    #: The name in messages and comparisons of calls.
    described_as = "Dataset"

    def __init__(self, dataset: Dataset, keep_states: int = 0) -> None:
        super().__init__()
        self.position = Position(dataset, keep_states)

    @property
    def num_batches(self) -> int | None:
        """Number of batches in an iteration, None if it is infinite."""
        size = self.position.dataset.cardinality()
        return None if size == INFINITE else size

    def row_pipeline(self) -> RowPipeline | None:
        """Return the arrays whose rows the pipeline chooses; None for another pipeline."""
        # Loaded where data stay on devices.
        from unisono.data._row_numbers import row_pipeline

        return row_pipeline(self.position.dataset)

    def row_numbers(self, rows: RowPipeline) -> Iterator[np.ndarray]:
        """Return the numbers of the rows of each batch of the next iteration.

        Args:
            rows: of this pipeline.
        """
        self.position.read_instead(rows.numbers)
        size = self.num_batches
        return map(self.__getitem__, itertools.count() if size is None else range(size))

    def __getitem__(self, index: int) -> Element:
        position = self.position
        if index == 0:
            # Keras requests the first batch once to build a model. That was not an iteration.
            position.begin(looked_only=position.given == 1 and self.num_batches != 1)
        if index != position.given:
            raise InvalidArgumentError(
                "The batches of a Dataset must be read in order. "
                f"Received: index={index} after {position.given} batches. Write fit(..., shuffle=False)."
            )
        return position.next()


class KerasStream(grain.IterDataset):
    """The batches of a data set of unknown size."""

    #: As for `KerasInput`.
    described_as = "Dataset"

    def __init__(self, dataset: Dataset, keep_states: int = 0) -> None:
        super().__init__()
        self.position = Position(dataset, keep_states)

    def __iter__(self) -> grain.DatasetIterator:
        # Keras' adapter inspects two batches, and then `fit` one to build the model.
        self.position.begin(looked_only=self.position.given <= 2)
        return _StreamIterator(self.position)


class _StreamIterator(grain.DatasetIterator):
    def __init__(self, position: Position) -> None:
        super().__init__()
        self._position = position

    def __next__(self) -> Element:
        return self._position.next()

    def __iter__(self) -> Iterator[Element]:
        return self

    def get_state(self) -> dict[str, Any]:
        return self._position.state_after(self._position.given)

    def set_state(self, state: dict[str, Any]) -> None:
        self._position.resume_from(state)
