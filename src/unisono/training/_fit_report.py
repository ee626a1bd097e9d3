"""Reports of a `fit` to the launcher: what trains, and the logs of each epoch, as Keras has read them.

Tests: tests/virtual/training/test_fit_report.py.
"""

from __future__ import annotations

import math
import numbers
import socket
from typing import TYPE_CHECKING

import keras

from unisono.training._fit_extension import Logs, RunNumber

if TYPE_CHECKING:
    from unisono.cluster.liveness._task_events import TaskEventFile
    from unisono.training._model_calls import MethodCall

#: Keras' rows of a batch where `batch_size` does not say it.
_USUAL_ROWS = 32


class FitReport(keras.callbacks.Callback):
    """Tells the launcher when `fit` begins, and when an epoch ends.

    It reads no value of a device: at the end of an epoch, Keras has read the logs for its history.

    Args:
        call: of `fit`.
        events: of this process.
    """

    def __init__(self, call: MethodCall, events: TaskEventFile) -> None:
        super().__init__()
        self._call, self._events = call, events
        #: The steps of the run when the last epoch ended.
        self._ended_at: int | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Describe the training."""
        initial, batches = int(self._call.arguments.get("initial_epoch") or 0), self.params.get("steps")
        self._ended_at = None if self._events.is_resumed else self._events.step
        facts = {} if not (self._events.is_resumed and batches) else {"step": initial * batches}
        self._events.note(
            "fit",
            epochs=self.params.get("epochs"),
            batches=batches,
            epoch=initial,
            host=socket.gethostname(),
            config=self._config(batches),
            **facts,
        )

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Give the numbers of an epoch."""
        step, before = self._events.step, self._ended_at
        batches = self.params.get("steps") or (None if before is None else step - before)
        self._ended_at = step
        known = {name: float(x) for name, x in (logs or {}).items() if _is_read(x)}
        known = {name: x for name, x in known.items() if math.isfinite(x)}
        self._events.note("epoch", epoch=epoch + 1, batches=batches or None, logs=known)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Write what there is: what follows may take long."""
        self._events.flush()

    def _config(self, batches: int | None) -> list[list[str]]:
        """Return the facts of the training, as names and values for people."""
        call, model = self._call, self.model
        strategy, arguments = call.strategy, call.arguments
        rows = arguments.get("batch_size") or (_USUAL_ROWS if hasattr(call.data, "shape") else None)
        weights = sum(math.prod(weight.shape) for weight in model.weights)
        facts = {
            "model": f"{model.name}, {weights:,} weights",
            "strategy": None if strategy is None else type(strategy).__name__,
            "replicas": None if strategy is None else strategy.num_replicas_in_sync,
            "global batch size": rows,
            "optimizer": type(model.optimizer).__name__,
            "loss": model.loss if isinstance(model.loss, str) else None,
            "computes in": model.compute_dtype,
            "epochs": self.params.get("epochs"),
            "steps of an epoch": batches,
            "Keras": keras.__version__,
        }
        return [[name, str(value)] for name, value in facts.items() if value is not None]


def _is_read(value: object) -> bool:
    """Return whether a value is a number on the host that belongs to the model."""
    return isinstance(value, numbers.Real) and not isinstance(value, RunNumber)
