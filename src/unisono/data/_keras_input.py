"""What Keras' own `fit`, `evaluate` and `predict` take for a data set."""

from __future__ import annotations

from collections import deque
from typing import Any

import keras

from unisono._errors import InvalidArgumentError
from unisono.data._cardinality import INFINITE, UNKNOWN
from unisono.data._dataset import Dataset
from unisono.data._plan import PipelineIterator
from unisono.data._structure import Element


def as_keras_input(dataset: Dataset, keep_states: int = 0) -> KerasInput | Dataset:
    """Returns what to give to Keras instead of a data set, together with `shuffle=False`.

    A data set can be given to Keras as it is, because it is a `grain.IterDataset`. But then Keras does not
    know the number of batches, takes no `class_weight`, and begins an iteration only to look at two batches.

    Args:
        dataset: Its elements are batches.
        keep_states: For how many of the last batches the state after them is kept.

    Returns:
        A `keras.utils.PyDataset`; the data set itself where its size is unknown, for Keras' `PyDataset` must
        know it.
    """
    return dataset if dataset.cardinality() == UNKNOWN else KerasInput(dataset, keep_states)


class KerasInput(keras.utils.PyDataset):
    """The batches of a data set, one iteration after the other.

    Keras asks for batch 0, 1, ... of each iteration; batch 0 begins the next one.

    Args:
        dataset: Its cardinality is known or infinite.
        keep_states: For how many of the last batches the state after them is kept.
    """

    def __init__(self, dataset: Dataset, keep_states: int = 0) -> None:
        super().__init__()
        self._dataset = dataset
        self._iterator: PipelineIterator | None = None
        self._given = 0
        self._start: dict[str, Any] | None = None
        self._restored: dict[str, Any] | None = None
        self._states: deque[tuple[int, dict[str, Any]]] = deque(maxlen=keep_states)

    @property
    def num_batches(self) -> int | None:
        """Number of batches in an iteration, None if it is infinite."""
        size = self._dataset.cardinality()
        return None if size == INFINITE else size

    def __getitem__(self, index: int) -> Element:
        if index == 0:
            self._begin()
        if self._iterator is None or index != self._given:
            raise InvalidArgumentError(
                "The batches of a Dataset must be read in order. "
                f"Received: index={index} after {self._given} batches. Write fit(..., shuffle=False)."
            )
        batch = next(self._iterator)
        self._given += 1
        if self._states.maxlen:
            self._states.append((self._given, self._iterator.get_state()))
        return batch

    def _begin(self) -> None:
        if self._iterator is not None and self._given == 1 and self.num_batches != 1:
            # Keras looks at the first batch to build a model: that was no iteration.
            self._restored = self._start
        if self._iterator is not None:
            self._iterator.close()
        self._iterator = iter(self._dataset)
        if self._restored is not None:
            self._iterator.set_state(self._restored)
            self._restored = None
        self._start = self._iterator.get_state()
        self._given = 0
        self._states.clear()

    def state_after(self, batches: int) -> dict[str, Any]:
        """Returns the state after a batch of this iteration, however far Keras has read ahead since.

        Args:
            batches: How many batches were used.

        Returns:
            What `resume_from` takes.

        Raises:
            InvalidArgumentError: That state was not kept.
        """
        for given, state in self._states:
            if given == batches:
                return state
        raise InvalidArgumentError(
            f"A state can be had for the last {self._states.maxlen} batches. "
            f"Received: batches={batches}, after {self._given} were given. "
            "Write as_keras_input(dataset, keep_states=64)."
        )

    def resume_from(self, state: dict[str, Any]) -> None:
        """Makes the next iteration go on from a state; those after it are complete again.

        Args:
            state: From `state_after`, in this process or another.
        """
        self._restored = state
