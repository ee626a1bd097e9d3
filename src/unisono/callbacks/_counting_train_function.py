"""Around a model's train function: counts batches, keeps the state, and passes over what was done before.

Tests: tests/virtual/callbacks/test_resume.py, tests/cluster/test_backup.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras

from unisono._types import PyTree
from unisono.callbacks._resumable_data import are_same, fingerprint, warn_of_other_batch
from unisono.data._keras_input import Position
from unisono.step._layout import Phases
from unisono.training.groups._lookahead import StepLookahead
from unisono.training.trainer._protocol import set_lookahead

#: Methods of a callback that have been called for the batches that are passed over.
_HOOKS = ("on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


class CountedBatches:
    """An iterator that counts what was taken from it."""

    def __init__(self, iterator: Iterator[PyTree], on_first: Callable[[PyTree], None] | None = None) -> None:
        self._iterator, self._on_first = iterator, on_first
        self.count = 0

    def __iter__(self) -> Iterator[PyTree]:
        return self

    def __next__(self) -> PyTree:
        item = next(self._iterator)
        if self.count == 0 and self._on_first is not None:
            self._on_first(item)
        self.count += 1
        return item

    @property
    def rows(self) -> Iterator[PyTree]:
        """The same batches, as rows of arrays on the devices where these lie there."""
        self._iterator = getattr(self._iterator, "rows", self._iterator)
        return self


class CountingTrainFunction:
    """A `train_function` whose last state can be seen, and which can pass over batches.

    Args:
        function: Keras' own or a strategy's.
        position: where the data stands, if that is known.
        phases: of the model's replicas.
        every: after how many batches the state is looked at, where the function runs ahead; 0 for never.
        shared_size: the number of batches in an iteration over the data that epochs share; None for none.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        steps_per_execution: int,
        position: Position | None,
        phases: Phases,
        every: int = 0,
        shared_size: int | None = None,
    ) -> None:
        self._function, self._every, self._shared_size = function, every, shared_size
        self._together = max(1, steps_per_execution)
        self._position, self._phases = position, phases
        self._iteration = 0
        #: Batches used of the running iteration over the data.
        self.used = 0
        self.state: PyTree = None
        self.logs: PyTree = {}
        self.batches_in_epoch = 0
        self.batches = 0
        #: Batches that are still to be taken without computing anything.
        self.to_pass = 0
        #: Fingerprints of the first batch of the epoch, or of an iteration that epochs share; of all batches;
        #: and of the required first batch, empty if not known.
        self.first: list[str] = []
        self.first_of_run: list[str] | None = None
        self.expected: list[str] = []

    def begin_epoch(self) -> None:
        """Count batches from zero."""
        self.state, self.batches_in_epoch = None, 0
        if self._shared_size is not None and self.used >= self._shared_size:
            self.used = 0
        if self._is_at_first:
            self.first = []

    @property
    def _is_at_first(self) -> bool:
        """True if the fingerprint of the next batch is kept."""
        return not (self.batches_in_epoch if self._shared_size is None else self.used)

    def _begin_data(self, batch: PyTree) -> None:
        self.first = fingerprint(batch)
        self.first_of_run = self.first if self.first_of_run is None else self.first_of_run
        if not are_same(self.expected, self.first):
            warn_of_other_batch("data")
        self.expected = []

    def __call__(self, state: PyTree, iterator: Iterator[PyTree]) -> tuple[PyTree, PyTree]:
        """Keras' convention."""
        if self.to_pass:
            return self._pass(state, iterator)
        on_first = self._begin_data if self._is_at_first else None
        counted, held = CountedBatches(iterator, on_first), self._num_held()
        self.logs, self.state = self._function(state, counted)
        # What the look-ahead holds was taken from the data, and is not trained yet.
        used = counted.count - (self._num_held() - held)
        self._count(used)
        self.batches += used
        return self.logs, self.state

    @property
    def lookahead(self) -> StepLookahead | None:
        """The part of the function that runs ahead of Keras' loop."""
        return getattr(self._function, "lookahead", None)

    @lookahead.setter
    def lookahead(self, value: StepLookahead | None) -> None:
        set_lookahead(self._function, value)
        if value is not None:
            value.until = self._until

    @property
    def plain_function(self) -> Callable[..., Any]:
        """The function alone, for calls that a callback makes within `fit`."""
        return self._function

    @property
    def is_between(self) -> bool:
        """True if no batch has changed the state since the last one whose end the callbacks have seen."""
        return self.lookahead is None or self.lookahead.is_between

    def _num_held(self) -> int:
        return 0 if self.lookahead is None else self.lookahead.num_held

    def _until(self) -> int:
        """Batches until the next one after which the state is looked at."""
        left = sys.maxsize if not self._every else self._every - self.batches % self._every
        return min(left, self._phases.steps_to_end(self._function))

    def _count(self, batches: int) -> None:
        self.batches_in_epoch += batches
        if self._position is not None and self._position.iterations != self._iteration:
            self._iteration, self.used = self._position.iterations, 0
        self.used += batches

    def _pass(self, state: PyTree, iterator: Iterator[PyTree]) -> tuple[PyTree, PyTree]:
        taken, is_at_first = min(self._together, self.to_pass), self._is_at_first
        for i in range(taken):
            batch = next(iterator)
            if i == 0 and is_at_first:
                self._begin_data(batch)
        self.to_pass -= taken
        self._count(taken)
        if self.lookahead is not None:
            self.lookahead.skip(taken)
        return self.logs, state

    # `StepTimer` looks for the wrapped function's `timer`, for example.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def mute(callbacks: list[keras.callbacks.Callback], *, is_whole: bool = False) -> Callable[[], None]:
    """Disable the hooks of batches and of an epoch's beginning until the returned function is called."""
    hooks = (*_HOOKS, "on_epoch_end") if is_whole else _HOOKS
    # Keras' `LambdaCallback` has hooks of its own.
    own = [{hook: vars(c)[hook] for hook in hooks if hook in vars(c)} for c in callbacks]
    for callback in callbacks:
        for hook in hooks:
            # On the object: this hides the method of the class, and deleting it restores the method.
            vars(callback)[hook] = _silent

    def unmute() -> None:
        for callback, before in zip(callbacks, own, strict=True):
            for hook in hooks:
                vars(callback).pop(hook, None)
            vars(callback).update(before)

    return unmute


def _silent(*args: Any, **kwargs: Any) -> None:
    """Take the place of a hook for a batch that the callback has already seen."""
