"""Steps that run ahead of Keras' loop, several in one program.

Starting a program costs the host and the devices' threads as much time as a small model's step
takes. Where no callback sees single batches, `fit`, `evaluate` and `predict` take the next few batches
at once, run their steps in one program, and then hand out their logs or predictions one by one: Keras'
loop, its logs and its counts are what they were.

Tests: tests/virtual/training/test_lookahead.py.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import jax
import numpy as np

from unisono._types import PyTree
from unisono.training.groups._batch_source import BatchSource, GroupPredictions, GroupResult
from unisono.training.groups._group_size import IN_FLIGHT
from unisono.training.groups._multi_step import LazyArray
from unisono.training.trainer._protocol import State


class AheadFunction(Protocol):
    """A function whose steps may run ahead of Keras' loop."""

    def run(self, source: BatchSource, state: State, iterator: Iterator[PyTree]) -> tuple[PyTree, State]:
        """Run the groups of one call, and return what the source hands out."""

    def state_after(self, state: State) -> State:
        """Return the state for Keras after a step that was run ahead."""


class StepLookahead(BatchSource):
    """What a call of `fit`, `evaluate` or `predict` has taken and computed ahead of Keras' loop.

    Args:
        per_call: how many steps Keras asks for at a time: `steps_per_execution`.
        is_predict: whether Keras gets predictions, of all of these steps, instead of the last one's logs.
    """

    is_ahead = True
    #: True if a callback may see that steps run ahead of it; see `Speculation`.
    is_guess = False

    def __init__(self, per_call: int = 1, is_predict: bool = False) -> None:
        super().__init__()
        self._per_call, self._is_predict = per_call, is_predict
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
    def num_queued(self) -> int:
        """How many steps of the program whose results are handed out follow the last one."""
        return len(self._logs)

    @property
    def num_held(self) -> int:
        """How many batches were taken from the data, and not used yet."""
        return len(self._held) + len(self._again)

    def continue_from(self, is_unchanged: bool) -> None:
        """Discard what runs ahead where a callback has changed the state, which none does here."""

    def begin_epoch(self, steps: int | None, ends_data: bool = False) -> None:
        """Note that an epoch begins; discard what is left of one that was interrupted.

        Args:
            steps: of the epoch, behind which no batches follow if it `ends_data`; None where unknown.
        """
        # Keras asks for as many at each call, also at the last one.
        self.left = steps if ends_data else steps and -(-steps // self._per_call) * self._per_call
        self.epoch_steps, self.epoch = steps, object()
        self._held.clear()
        self._again.clear()
        self._logs.clear()
        self._raised = None

    def step(self, function: AheadFunction, state: State, iterator: Iterator[PyTree]) -> tuple[PyTree, State]:
        """Hand out the steps of a call: run ahead, or with the next groups."""
        logs = self.next_logs()
        if logs is None:
            logs, state = function.run(self, state, iterator)
        else:
            state = function.state_after(state)
        return (logs, state) if self._per_call == 1 else self._further(function, logs, state, iterator)

    def _further(
        self, function: AheadFunction, first: PyTree, state: State, iterator: Iterator[PyTree]
    ) -> tuple[PyTree, State]:
        """Hand out the steps of a call behind the first one."""
        results = [first]
        for _ in range(self._per_call - 1):
            logs = None
            if self._logs:
                logs = self.next_logs()
            elif self.left == 0 or not self.has_next(iterator):
                break
            else:
                self.skip(1)
                logs, state = function.run(self, state, iterator)
            results.append(logs)
        if not self._is_predict:
            return results[-1], state
        return jax.tree.map(lambda *parts: np.concatenate(parts), *results), state

    def next_logs(self) -> PyTree | None:
        """Note that Keras asks for a step; return its logs where it was run ahead, else None."""
        self.skip(1)
        return self._logs.popleft() if self._logs else None

    def skip(self, steps: int) -> None:
        """Note that Keras has asked for steps."""
        if self.left is not None:
            self.left -= steps

    @property
    def room(self) -> int:
        """How many batches may follow, up to the end of the epoch and to the next step that is looked at."""
        limits = [sys.maxsize if self.left is None else self.left]
        return min(limits if self.until is None else [*limits, self.until() - 1])

    def hand_out(self, results: Sequence[GroupResult], is_predict: bool) -> PyTree:
        """Return the first step's logs or predictions, and queue what Keras asks for in the next calls."""
        last = results[-1]
        if not last.is_stacked:
            return last.value if is_predict else last.newest()
        queue = self.queue_predictions if is_predict else self.queue_logs
        return queue(last.value, last.count)

    def queue_logs(self, logs: PyTree, count: int) -> PyTree:
        """Queue the logs of several steps, and return the first one's."""
        for i in range(count):
            self._logs.append(jax.tree.map(lambda every, i=i: LazyArray.of_step(every, i), logs))
        return self._logs.popleft()

    def queue_predictions(self, outputs: PyTree, count: int) -> PyTree:
        """Queue the predictions of several steps, and return the first one's.

        Args:
            outputs: pytree of arrays with the rows of one step after the other.
        """
        group = GroupPredictions(outputs, count)
        self._logs.extend(group.steps())
        self._on_devices.append(group)
        # Those of programs that are done: the devices' memory holds no more than the programs in flight.
        while len(self._on_devices) > IN_FLIGHT:
            self._on_devices.popleft().fetch()
        return self._logs.popleft()
