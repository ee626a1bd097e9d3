"""Loggers of other packages, which report to a service or write files: of several workers the chief's alone.

Tests: tests/unit/strategies/test_loggers.py, tests/cluster/test_chief.py.
"""

from __future__ import annotations

import contextlib
import sys

import keras

#: Packages whose Keras callbacks run on the chief alone, by the first part of a module's name.
LOGGERS = ("aim", "comet_ml", "dvclive", "mlflow", "neptune", "neptune_tensorflow_keras", "wandb")

#: What keeps MLflow silent, as long as it is held.
_SILENCED: list[contextlib.AbstractContextManager[None]] = []


def is_logger(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback's class, or one that it extends, is of a package in the table.

    >>> is_logger(keras.callbacks.History())
    False
    """
    return any(kind.__module__.partition(".")[0] in LOGGERS for kind in type(callback).__mro__)


def silence_autologging() -> None:
    """Keep MLflow's `autolog` from making a run for this worker.

    It wraps `fit` outside of what a strategy wraps, so that to leave out its callback is not enough. Its
    `autolog(disable=True)` would put back the `fit` that was there before, without the strategies' part.
    """
    disable = getattr(sys.modules.get("mlflow.utils.autologging_utils"), "disable_autologging", None)
    if disable is not None and not _SILENCED:
        _SILENCED.append(disable())
        _SILENCED[0].__enter__()
