"""Where the batches of a call come from, and what Keras' loop gets for their steps.

A policy is one class: `BatchSource` runs `steps_per_execution` batches at a call, `StepLookahead` several
steps ahead of Keras' loop, and `Speculation` ahead of callbacks which see single batches.

Tests: tests/unit/training/test_lookahead.py, tests/virtual/training/test_counts.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import jax
import numpy as np

from unisono._types import PyTree
from unisono.training.groups._group_results import GroupResult

#: Seconds after which the host no longer waits for one more batch: a program of fewer steps is better than
#: idle devices.
_PATIENCE = 0.01


class BatchSource:
    """Takes the batches of one call from the data, and keeps what was taken too early."""

    #: Whether a call runs one group of as many batches as pay, instead of `steps_per_execution` batches.
    is_ahead = False
    #: Whether the last batch had been taken before, and was given back.
    is_again = False
    #: How many steps the whole call has; None where that is unknown.
    planned: int | None = None

    def __init__(self) -> None:
        self._held: list[PyTree] = []
        self._raised: Exception | None = None

    @property
    def room(self) -> int:
        """How many batches may be taken behind the first one of a group."""
        return sys.maxsize

    def take_first(self, iterator: Iterator[PyTree]) -> PyTree:
        """Return the next batch.

        Raises:
            Exception: what the data raised when they were asked ahead of time.
        """
        if self._held:
            return self._held.pop()
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised
        return next(iterator)

    def take_more(
        self, iterator: Iterator[PyTree], most: int, fits: Callable[[PyTree], bool], waits: bool
    ) -> Iterator[PyTree]:
        """Give further batches for the program of the first one.

        Args:
            fits: whether a batch may go with the first. One that does not is the next first one.
        """
        began = perf_counter()
        for _ in range(most):
            if not waits and perf_counter() - began > _PATIENCE:
                return
            try:
                batch = next(iterator)
            except Exception as error:
                # Raised by `take_first`, when Keras asks for this batch: the steps before it count.
                self._raised = error
                return
            if not fits(batch):
                self._held.append(batch)
                return
            yield batch

    def hand_out(self, results: Sequence[GroupResult], is_predict: bool) -> PyTree:
        """Return what Keras gets for a call: the last logs, or all predictions."""
        last = results[-1]
        if not is_predict:
            # As in Keras, whose metrics are those of all steps so far.
            return last.newest()
        if len(results) == 1:
            return last.rows() if last.is_stacked else last.value
        return jax.tree.map(lambda *parts: np.concatenate(parts), *[result.rows() for result in results])
