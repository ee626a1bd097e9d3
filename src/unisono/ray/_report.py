"""A training's reports to Ray: metrics and models for Ray Train and Ray Tune, and where its backups are.

Tests: tests/unit/ray/test_report.py, tests/cluster/test_ray_cluster.py.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from unisono._checks import checked_whole
from unisono._errors import ContextError, InvalidArgumentError
from unisono._types import Logs
from unisono.cluster_resolver._ray import ray_train_rank

_MODEL = "model.keras"


class ReportCallback(keras.callbacks.Callback):
    """Report the metrics of each epoch of `fit`, and the model, to Ray Train or Ray Tune.

    Each worker of Ray Train reports, as Ray asks for; the first one saves the model, as `model.keras` in the
    folder of the checkpoint. In a trial of Ray Tune its one process does both.

    Args:
        save_every: the model is saved in the last of so many epochs; 0 for never.
        metrics: the names of those that are reported; None for all.

    Raises:
        InvalidTypeError: when `save_every` is not a whole number.
        InvalidArgumentError: when `save_every` is below 0; at the end of an epoch, when a metric is missing.
        ContextError: when training begins outside a worker of Ray Train and a trial of Ray Tune.

    >>> ReportCallback(save_every=2, metrics=["loss"]).save_every
    2
    """

    def __init__(self, save_every: int = 1, metrics: Sequence[str] | None = None) -> None:
        super().__init__()
        self.save_every = checked_whole(save_every, "save_every", 0, "Write `ReportCallback(save_every=1)`.")
        self.metrics = metrics

    def on_train_begin(self, logs: Logs = None) -> None:
        """Check that Ray receives what is reported."""
        _reporter()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Report the metrics, and the model in the last of `save_every` epochs."""
        values = self._values(logs or {})
        known = ray_train_rank()
        with contextlib.ExitStack() as stack:
            checkpoint = None
            if self.save_every and (epoch + 1) % self.save_every == 0 and (known is None or known[0] == 0):
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="unisono-report-"))
                self.model.save(Path(folder) / _MODEL)
                checkpoint = importlib.import_module("ray.train").Checkpoint.from_directory(folder)
            # Before the folder is removed: Ray has copied it when this returns.
            _reporter().report(values, checkpoint=checkpoint)

    def _values(self, logs: dict[str, Any]) -> dict[str, float]:
        names = list(logs) if self.metrics is None else list(self.metrics)
        if missing := [name for name in names if name not in logs]:
            raise InvalidArgumentError(
                f"`metrics` must be names in the logs of an epoch. Received: {', '.join(missing)}; the logs "
                f"have {', '.join(logs)}. Compile the model with these metrics, or leave `metrics` out."
            )
        return {name: _plain(logs[name]) for name in names}


def _plain(value: Any) -> Any:
    """Return a number of Python, where a value is a scalar: Ray's own processes may lack JAX."""
    array = np.asarray(value)
    return array.item() if math.prod(array.shape) == 1 else array


def _reporter() -> Any:
    """Return the module whose `report` this process calls: Ray Train's or Ray Tune's."""
    if ray_train_rank() is not None:
        return sys.modules["ray.train"]
    tune: Any = sys.modules.get("ray.tune")
    if tune is not None and tune.get_context().get_trial_id() is not None:
        return tune
    raise ContextError(
        "ReportCallback must be used in a worker of Ray Train or a trial of Ray Tune. Received: a process "
        "that is neither. Leave it out here; from `unisono.ray.Trainer` return the metrics."
    )


def storage_path(name: str) -> str:
    """Return a path in the storage of this run of Ray Train, for backups, checkpoints and logs.

    It is the same on all workers, and after restarts of the run.

    Args:
        name: of the file or folder there.

    Returns:
        `storage_path` and `name` of Ray's `RunConfig`, and the name.

    Raises:
        ContextError: outside a worker of Ray Train.
        InvalidArgumentError: where Ray's storage is no folder that all nodes share, such as a bucket.

    >>> try:
    ...     storage_path("backup")
    ... except RuntimeError as error:
    ...     print(str(error).partition(".")[0])
    `storage_path` must be called in a worker of Ray Train
    """
    if ray_train_rank() is None:
        raise ContextError(
            "`storage_path` must be called in a worker of Ray Train. Received: another process. Pass a path "
            "that all nodes share."
        )
    storage: Any = sys.modules["ray.train"].get_context().get_storage()
    if storage.storage_filesystem.type_name != "local":
        raise InvalidArgumentError(
            "The storage of Ray must be a folder that all nodes share. Received: "
            f"{storage.storage_filesystem.type_name}://{storage.experiment_fs_path}. Write "
            "`RunConfig(storage_path='/shared')`, or pass a path of your own."
        )
    return str(Path(storage.experiment_fs_path) / name)
