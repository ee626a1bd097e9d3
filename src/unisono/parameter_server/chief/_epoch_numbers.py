"""What people see of a training on parameter servers: numbers in the logs of each epoch of `fit`.

Tests: tests/virtual/strategies/test_parameter_server_logs.py.
"""

from __future__ import annotations

import dataclasses
import time

import keras

from unisono._types import Logs
from unisono.parameter_server.server._traffic import StepCosts, StepTally
from unisono.training._fit_extension import RunNumber


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
