"""Steps of `fit` that run ahead of Keras' loop, several in one program, where no callback sees single ones.

Starting a program costs the host and the devices' threads as much time as a small model's step
takes. Where no callback sees single batches, `fit` takes the next few batches at once, runs their
steps in one program, and then hands out their logs one by one: Keras' loop, its logs and its
counts are what they were.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from time import perf_counter

import jax
import keras

from unisono._types import PyTree, UserValue
from unisono.training._fit_extension import flat_callbacks, overrides
from unisono.training.trainer._multi_step import StepLog
from unisono.training.trainer._protocol import set_lookahead

#: Seconds after which the host no longer waits for one more batch: a program of fewer steps is better than
#: idle devices.
_PATIENCE = 0.01

#: The methods of a callback that see single batches, before and after the step.
_BEFORE = ("on_batch_begin", "on_train_batch_begin")
_AFTER = ("on_batch_end", "on_train_batch_end")


class BatchSource:
    """Takes batches from the data, and keeps what was taken too early."""

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
    """What a call of `fit` has taken from its data, and computed, ahead of Keras' loop."""

    def __init__(self) -> None:
        super().__init__()
        #: Steps that Keras will still ask for in this epoch; None where the length of the data is unknown.
        self.left: int | None = None
        #: Gives how many steps may run before one whose state a callback reads; None without such a callback.
        self.until: Callable[[], int] | None = None
        self._logs: collections.deque[PyTree] = collections.deque()

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


class _EpochMarks(keras.callbacks.Callback):
    """Gives the train function its lookahead, and the lookahead the length of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._lookahead = StepLookahead()

    def on_train_begin(self, logs: PyTree = None) -> None:
        # Keras makes the train function within `fit`, before this hook.
        set_lookahead(self.model.train_function, self._lookahead)

    def on_epoch_begin(self, epoch: int, logs: PyTree = None) -> None:
        self._lookahead.begin_epoch(self.params["steps"])


def _sees_batches(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback does anything at single batches that must happen between two steps."""
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return bool(callback.save_freq != "epoch")
    if hasattr(callback, "sees_batches"):
        return bool(callback.sees_batches)
    # Keras calls the end hooks of `async_safe` callbacks in another thread, beside the next step: they can
    # read the logs alone.
    hooks = _BEFORE if getattr(callback, "async_safe", False) else _BEFORE + _AFTER
    return overrides(callback, *hooks)


def call_batch_end(
    original: Callable[..., None], self: keras.callbacks.CallbackList, batch: int, logs: PyTree = None
) -> None:
    """Call `CallbackList.on_train_batch_end` where some callback has such a hook.

    Keras' own method starts a thread that waits for the step and reads its logs, also for no hook at all.

    Args:
        original: Keras' method.
        self: the list.
        batch: the step's number.
        logs: its logs.
    """
    runs_ahead = any(isinstance(c, _EpochMarks) for c in self.callbacks)
    if not runs_ahead or any(overrides(c, *_AFTER) for c in self.callbacks):
        original(self, batch, logs)


def can_run_ahead(model: keras.Model, callbacks: UserValue) -> bool:
    """Return whether no callback can observe how many steps are done between two batches of `fit`.

    Args:
        model: bound to a strategy.
        callbacks: an argument of `fit`.
    """
    if model.run_eagerly or not model.jit_compile or model.steps_per_execution != 1:
        return False
    if any(getattr(jax.config, name) for name in ("jax_debug_nans", "jax_debug_infs")):
        return False
    # A user's `CallbackList` cannot be extended by `_EpochMarks`, and may hide hooks of batches.
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return False
    return not any(_sees_batches(c) for c in flat_callbacks(callbacks))


@contextlib.contextmanager
def with_lookahead(
    model: keras.Model, arguments: dict[str, UserValue], allowed: bool
) -> Iterator[dict[str, UserValue]]:
    """Let the train function run ahead during a call of `fit`.

    Args:
        model: bound to a strategy.
        arguments: of `fit`, by name.
        allowed: whether `can_run_ahead` on all workers.

    Yields:
        The arguments for Keras' own `fit`.
    """
    callbacks = arguments.get("callbacks")
    if not allowed:
        yield arguments
        return
    try:
        yield {**arguments, "callbacks": [*flat_callbacks(callbacks), _EpochMarks()]}
    finally:
        set_lookahead(model.train_function, None)
