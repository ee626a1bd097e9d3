"""Around a model's train function: counts batches, keeps the state, and passes over what was done before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from unisono.data._keras_input import Position

#: Methods of a callback that have been called for the batches that are passed over.
_HOOKS = ("on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


class Counted:
    """An iterator that counts what was taken from it."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = next(self._iterator)
        self.count += 1
        return item


class WatchedTrainFunction:
    """A `train_function` whose last state can be seen, and which can pass over batches.

    Args:
        function: Keras' own or a strategy's.
        steps_per_execution: how many batches it takes at once.
        position: where the data stands, if that is known.
    """

    def __init__(
        self, function: Callable[..., Any], steps_per_execution: int, position: Position | None
    ) -> None:
        self._function = function
        self._together = max(1, steps_per_execution)
        self._position = position
        self._iteration = 0
        #: Batches used of the running iteration over the data.
        self.used = 0
        self.state: Any = None
        self.logs: Any = {}
        self.batches_in_epoch = 0
        self.batches = 0
        #: Batches that are still to be taken without computing anything.
        self.to_pass = 0

    def begin_epoch(self) -> None:
        """Count batches from zero."""
        self.state, self.batches_in_epoch = None, 0

    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Keras' convention."""
        if self.to_pass:
            return self._pass(state, iterator)
        counted = Counted(iterator)
        self.logs, self.state = self._function(state, counted)
        self._count(counted.count)
        self.batches += counted.count
        return self.logs, self.state

    def _count(self, batches: int) -> None:
        self.batches_in_epoch += batches
        if self._position is not None and self._position.iterations != self._iteration:
            self._iteration, self.used = self._position.iterations, 0
        self.used += batches

    def _pass(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        taken = min(self._together, self.to_pass)
        for _ in range(taken):
            next(iterator)
        self.to_pass -= taken
        self._count(taken)
        return self.logs, state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def mute(callbacks: list[Any]) -> Callable[[], None]:
    """Keep callbacks from hearing of an epoch's beginning and of batches until the result is called."""
    for callback in callbacks:
        for hook in _HOOKS:
            # On the object, where it hides the method of the class.
            vars(callback)[hook] = _silent

    def unmute() -> None:
        for callback in callbacks:
            for hook in _HOOKS:
                vars(callback).pop(hook, None)

    return unmute


def _silent(*args: Any, **kwargs: Any) -> None:
    """Take the place of a hook of a batch that was heard of before."""
