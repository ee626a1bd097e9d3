"""Callbacks of `fit` on parameter servers: numbers in the logs of epochs, and Keras' own that need no batch.

Where a callback has a hook for batches, Keras reads a step's logs before it asks for the next step: workers
would take turns. With `ModelCheckpoint`, at its defaults, all 72 steps of a `fit` ran one at a time
(2026-11-22).

Tests: tests/unit/parameter_server/chief/test_fit_callbacks.py,
tests/virtual/strategies/test_parameter_server_logs.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import keras

from unisono._types import Logs
from unisono.parameter_server.server._traffic import StepCosts, StepTally
from unisono.training._fit_extension import RunNumber, flat_callbacks, overrides

#: In these hooks a callback with `save_freq="epoch"` does nothing.
_IDLE = (
    keras.callbacks.ModelCheckpoint.on_train_batch_end,
    keras.callbacks.BackupAndRestore.on_train_batch_end,
)
_OTHERS = ("on_batch_end", "on_test_batch_end", "on_predict_batch_end")


@contextlib.contextmanager
def epoch_callbacks(callbacks: object) -> Iterator[None]:
    """Tell Keras, within a block, which callbacks need no batch's logs: they are `async_safe`.

    >>> save = keras.callbacks.ModelCheckpoint("{epoch}.keras")
    >>> with epoch_callbacks([save]):
    ...     save.async_safe
    True
    >>> hasattr(save, "async_safe")
    False
    """
    marked = [c for c in flat_callbacks(callbacks) if _is_idle(c) and not hasattr(c, "async_safe")]
    for callback in marked:
        callback.async_safe = True
    try:
        yield
    finally:
        for callback in marked:
            del callback.async_safe


def _is_idle(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback saves at the ends of epochs alone, as Keras has written it."""
    is_keras = getattr(callback.on_train_batch_end, "__func__", None) in _IDLE
    return is_keras and callback.save_freq == "epoch" and not overrides(callback, *_OTHERS)


class EpochNumbers(keras.callbacks.Callback):
    """Add speed, staleness and bytes of an epoch's steps to its logs.

    It is the first of the callbacks of `fit`: all others but the history see what it adds. A metric of the
    same name stays.
    """

    def __init__(self, tally: StepTally) -> None:
        super().__init__()
        self._tally = tally
        self._began = 0.0
        #: What was found when the steps of the epoch had run; None before.
        self._found: dict[str, float] | None = None
        #: The same by worker, of the last epoch.
        self.of_workers: dict[str, float] = {}

    def on_train_begin(self, logs: Logs = None) -> None:
        """Begin the first epoch, whose hook a resumed run does not call."""
        self._begin()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Begin to count."""
        self._begin()

    def on_test_begin(self, logs: Logs = None) -> None:
        """Count until the validation begins."""
        self._end()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Add the numbers."""
        self._end()
        if logs is not None and self._found is not None:
            for name, value in self._found.items():
                logs.setdefault(name, RunNumber(value))

    def _begin(self) -> None:
        self._tally.take()
        self._began, self._found = time.perf_counter(), None

    def _end(self) -> None:
        if self._found is not None:
            return
        seconds = time.perf_counter() - self._began
        workers = self._tally.take()
        total = StepCosts()
        for costs in workers.values():
            total.add(dataclasses.astuple(costs))
        self._found = {"steps_per_second": total.steps / seconds, **total.numbers}
        self.of_workers = {
            f"worker_{worker}/{name}": value
            for worker, costs in workers.items()
            for name, value in [("steps", float(costs.steps)), *costs.numbers.items()]
        }
