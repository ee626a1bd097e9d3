"""Steps that run ahead of Keras' loop, several in one program.

Starting a program costs the host and the devices' threads as much time as a small model's step
takes. Where no callback sees single batches, `fit`, `evaluate` and `predict` take the next few batches
at once, run their steps in one program, and then hand out their logs or predictions one by one: Keras'
loop, its logs and its counts are what they were.

Tests: tests/virtual/training/test_lookahead.py.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from time import perf_counter

import jax

from unisono._types import PyTree
from unisono.training.trainer._multi_step import IN_FLIGHT, StepLog
from unisono.training.trainer._predictions import GroupPredictions

#: Seconds after which the host no longer waits for one more batch: a program of fewer steps is better than
#: idle devices.
_PATIENCE = 0.01


class BatchSource:
    """Takes batches from the data, and keeps what was taken too early."""

    #: Whether the last batch had been taken before, and was given back.
    is_again = False

    def __init__(self) -> None:
        self._held: list[PyTree] = []
        self._raised: Exception | None = None

    def take_first(self, iterator: Iterator[PyTree]) -> PyTree:
        """Return the next batch.

        Args:
            iterator: the data.

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
            iterator: the data.
            most: how many at most.
            fits: whether a batch may go with the first. One that does not is the next first one.
            waits: whether to wait for slow data.
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


class StepLookahead(BatchSource):
    """What a call of `fit`, `evaluate` or `predict` has taken and computed ahead of Keras' loop."""

    def __init__(self) -> None:
        super().__init__()
        #: Steps that Keras will still ask for in this epoch; None where the length of the data is unknown.
        self.left: int | None = None
        #: Gives how many steps may run before one whose state a callback reads; None without such a callback.
        self.until: Callable[[], int] | None = None
        self._logs: collections.deque[PyTree] = collections.deque()
        #: Predictions that are not in host memory yet.
        self._on_devices: collections.deque[GroupPredictions] = collections.deque()

    @property
    def is_between(self) -> bool:
        """Whether all steps that were computed were handed out: the state is that of Keras' loop."""
        return not self._logs

    @property
    def num_held(self) -> int:
        """How many batches were taken from the data, and not used yet."""
        return len(self._held)

    def begin_epoch(self, steps: int | None) -> None:
        """Note that an epoch begins; discard what is left of one that was interrupted.

        Args:
            steps: how many it has, if that is known.
        """
        self.left = steps
        self._held.clear()
        self._logs.clear()
        self._raised = None

    def next_logs(self) -> PyTree | None:
        """Note that Keras asks for a step; return its logs where it was run ahead, else None."""
        self.skip(1)
        return self._logs.popleft() if self._logs else None

    def skip(self, steps: int) -> None:
        """Note that Keras has asked for steps.

        Args:
            steps: how many.
        """
        if self.left is not None:
            self.left -= steps

    def take_more(
        self, iterator: Iterator[PyTree], most: int, fits: Callable[[PyTree], bool], waits: bool
    ) -> Iterator[PyTree]:
        """Give further batches, up to the end of the epoch and to the next step that is looked at."""
        if self.left is not None:
            most = min(most, self.left)
        if self.until is not None:
            most = min(most, self.until() - 1)
        return super().take_more(iterator, most, fits, waits)

    def queue_logs(self, logs: PyTree, count: int) -> PyTree:
        """Queue the logs of several steps, and return the first one's.

        Args:
            logs: pytree of arrays with one value for each step.
            count: how many steps.
        """
        for i in range(count):
            self._logs.append(jax.tree.map(lambda every, i=i: StepLog(every, i), logs))
        return self._logs.popleft()

    def queue_predictions(self, outputs: PyTree, count: int) -> PyTree:
        """Queue the predictions of several steps, and return the first one's.

        Args:
            outputs: pytree of arrays with the rows of one step after the other.
            count: how many steps.
        """
        group = GroupPredictions(outputs, count)
        self._logs.extend(group.steps())
        self._on_devices.append(group)
        # Those of programs that are done: the devices' memory holds no more than the programs in flight.
        while len(self._on_devices) > IN_FLIGHT:
            self._on_devices.popleft().fetch()
        return self._logs.popleft()
