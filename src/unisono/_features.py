"""The optional features, by what the core asks for: the one table below the strategies that names them.

A feature is one folder. It is loaded by the first program that uses it, and everything else works without it.

Tests: tests/virtual/test_shut_doors.py.
"""

from __future__ import annotations

import importlib
from typing import Any

from unisono._errors import UnsupportedError

#: From what is asked for to the module and name that has it.
FEATURES = {
    "sharded layout": "unisono.sharding._sharded_layout:ShardedLayout",
    "fully sharded layout": "unisono.sharding._fully_sharded_layout:FullyShardedLayout",
    "signs of other tasks": "unisono.cluster._lone_task:warning_in_tasks",
    "tasks of TF_CONFIG": "unisono.cluster._lone_task:warning_alone",
    "atomic writing of a model": "unisono._export._model_files:write_whole",
    "copy of a stored model": "unisono._export._model_files:local_file",
    "events of a task": "unisono.cluster.liveness._task_events:TaskEventFile",
    "heartbeat of a task": "unisono.cluster.liveness._heartbeat_file:HeartbeatFile",
    "strategy of several workers": "unisono.cluster.strategy._multi_worker:MultiWorkerMirroredStrategy",
}


def load(asked: str) -> Any:
    """Return what a feature has for the core, and load it at the first time.

    Args:
        asked: a key of the table.

    Raises:
        UnsupportedError: this installation lacks the feature's folder.

    >>> load("sharded layout").__name__
    'ShardedLayout'
    """
    path, _, name = FEATURES[asked].partition(":")
    try:
        return getattr(importlib.import_module(path), name)
    except ModuleNotFoundError as error:
        folder = ".".join(path.split(".")[:-1])
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise
        raise UnsupportedError(
            f"The {asked} needs the whole of Unisono. Received: an installation without `{folder}`. Install "
            "it again: `pip install --force-reinstall unisono`."
        ) from error
