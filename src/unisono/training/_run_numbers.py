"""Numbers of the logs of an epoch that are no metrics: callbacks see them, and the history of `fit` does not.

Tests: tests/virtual/strategies/test_parameter_server_logs.py.
"""

from __future__ import annotations

from collections.abc import Callable

import keras

from unisono._types import KerasWrap, Logs


class RunNumber(float):
    """A number that says how a run went, such as its speed, and nothing of the model."""


def wraps() -> list[KerasWrap]:
    """Return what is wrapped of `History`."""
    return [(keras.callbacks.History, "on_epoch_end", without_run_numbers)]


def without_run_numbers(
    original: Callable[..., None], self: keras.callbacks.History, epoch: int, logs: Logs = None
) -> None:
    """Add an epoch's logs to the history; takes the place of `History.on_epoch_end`."""
    original(self, epoch, {n: x for n, x in (logs or {}).items() if not isinstance(x, RunNumber)})
