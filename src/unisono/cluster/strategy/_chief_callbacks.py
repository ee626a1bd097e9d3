"""Callbacks when several workers train together: who writes and prints, and how decisions are shared.

Tests: tests/unit/strategies/test_loggers.py, tests/cluster/test_chief.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Collection, Sequence

import keras

from unisono._types import Json, Logs
from unisono.step._keras_internals import held_rate, restored_epoch, set_restored_epoch
from unisono.training._fit_extension import overrides
from unisono.training._step_form import optimizers_of

_LOG = logging.getLogger("unisono")

#: What writes files or sends messages: once is enough, and twice does harm (HDF5 locks, torn lines).
_CHIEF_ONLY = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)

#: Decide from logs alone, which are equal on all workers: they may end an epoch in its middle.
_DECIDES_FROM_LOGS = (keras.callbacks.TerminateOnNaN,)

#: Packages whose loggers report to a service or write files: their Keras callbacks run on the chief alone. By
#: the first part of a module's name.
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


def is_chief_only(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback acts on the chief alone.

    Its `chief_only` decides; without one, Keras' callbacks that write and those of `LOGGERS` do.

    >>> is_chief_only(keras.callbacks.CSVLogger("log.csv"))
    True
    """
    return bool(getattr(callback, "chief_only", isinstance(callback, _CHIEF_ONLY) or is_logger(callback)))


#: What Keras' own callbacks do at the start of `fit` or of an epoch is the same on all workers, or local.
_SAME_ON_ALL = (
    keras.callbacks.CSVLogger,
    keras.callbacks.EarlyStopping,
    keras.callbacks.History,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.TensorBoard,
    keras.callbacks.TerminateOnNaN,
)

#: The hooks for batches: a callback with one may stop in the middle of an epoch.
_BATCHES = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")

#: Read no weights and no variables of an optimizer but its learning rate.
_READ_NOTHING = (
    keras.callbacks.CSVLogger,
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.TerminateOnNaN,
)


def may_read_weights(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback may read weights where an epoch ends, perhaps on one worker alone.

    >>> may_read_weights(keras.callbacks.EarlyStopping()), may_read_weights(keras.callbacks.Callback())
    (False, True)
    """
    if type(callback) is keras.callbacks.EarlyStopping:
        return bool(callback.restore_best_weights)
    return type(callback) not in _READ_NOTHING and bool(getattr(callback, "_reads_weights", True))


#: Where a callback may decide something before the first step of an epoch.
DECISION_HOOKS = ("on_train_begin", "on_epoch_begin")


def decision_hooks(callbacks: Sequence[keras.callbacks.Callback]) -> set[str]:
    """Return those of `DECISION_HOOKS` at which a callback may decide something.

    >>> decision_hooks([keras.callbacks.EarlyStopping()])
    set()
    >>> decision_hooks([keras.callbacks.LearningRateScheduler(lambda epoch: 0.1)])
    {'on_epoch_begin'}
    """
    return {moment for moment in DECISION_HOOKS for callback in callbacks if _decides_at(callback, moment)}


def _decides_at(callback: keras.callbacks.Callback, moment: str) -> bool:
    method = getattr(getattr(callback, moment), "__func__", None)
    return all(method is not getattr(c, moment) for c in (keras.callbacks.Callback, *_SAME_ON_ALL))


def shared_decisions(
    broadcast: Callable[[bytes], bytes], others: Sequence[keras.callbacks.Callback], moments: Collection[str]
) -> SharedDecisions:
    """Return the last callback of a worker."""
    at_once = any(isinstance(c, _DECIDES_FROM_LOGS) for c in others)
    if any(overrides(c, *_BATCHES) for c in others) and not at_once:
        return _DeferStops(broadcast, moments)
    return SharedDecisions(broadcast, moments)


class SameState(keras.callbacks.Callback):
    """The first callback on every worker: before others save what an epoch has left, all compare it.

    Args:
        compare: raises where the values of variables differ between workers.
    """

    #: True for a callback of a strategy for its workers: it is in no backup.
    is_of_workers = True

    def __init__(self, compare: Callable[[Sequence[keras.Variable]], None]) -> None:
        super().__init__()
        self._compare = compare

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Compare what the optimizer has written, and what it writes with."""
        model = self.model
        slots = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
        self._compare([*slots, *model.trainable_variables, *model.non_trainable_variables])


class SharedDecisions(keras.callbacks.Callback):
    """The last callback on every worker: at an epoch's end all take over what the chief has decided.

    Whether to stop, and the learning rate, may come from clocks or files, which differ between
    workers. A stop in the middle of an epoch waits for its end, where all workers receive it.
    """

    #: As for `SameState`.
    is_of_workers = True

    def __init__(self, broadcast: Callable[[bytes], bytes], moments: Collection[str]) -> None:
        super().__init__()
        self._broadcast = broadcast
        self._hooks = moments
        self._stops_later = False

    def on_train_begin(self, logs: Logs = None) -> None:
        """Begin at the epoch that a callback of the chief has restored."""
        if "on_train_begin" in self._hooks:
            epoch = restored_epoch(self.model)
            self._share({"stop": bool(self.model.stop_training), "epoch": epoch})

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Forget the epoch before; a scheduler may just have set the learning rate."""
        self._stops_later = False
        if "on_epoch_begin" in self._hooks:
            self._share({"stop": bool(self.model.stop_training)})

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Take over the chief's decisions."""
        self._share({"stop": bool(self.model.stop_training or self._stops_later)})

    def _share(self, own: dict[str, Json]) -> None:
        """Take over the chief's decision and learning rate."""
        optimizer = self.model.optimizer
        is_variable = isinstance(held_rate(optimizer), keras.Variable)
        if is_variable:
            own["rate"] = float(optimizer.learning_rate)
        chiefs = json.loads(self._broadcast(json.dumps(own).encode()))
        self.model.stop_training = chiefs["stop"]
        if "epoch" in own:
            set_restored_epoch(self.model, chiefs["epoch"])
        if is_variable and own["rate"] != chiefs["rate"]:
            optimizer.learning_rate = chiefs["rate"]


class _DeferStops(SharedDecisions):
    """Shared decisions where a callback may stop in the middle of an epoch: the stop waits for its end."""

    def __init__(self, broadcast: Callable[[bytes], bytes], moments: Collection[str]) -> None:
        super().__init__(broadcast, moments)
        # Keras writes logs in another thread unless a callback has a hook for batches. Deferring a stop
        # needs no logs.
        self.async_safe = True
        self._trained: keras.Model = None

    def set_model(self, model: keras.Model) -> None:
        """Note the model: a batch's hook that asks for `self.model` makes Keras move the whole state."""
        super().set_model(model)
        self._trained = model

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Put a stop off to the end of the epoch."""
        # Perhaps in another thread, beside a step that takes the state over.
        if self._trained.stop_training:
            self._trained.stop_training = False
            if not self._stops_later:
                _LOG.info("A callback stops training; all workers do so at the end of this epoch.")
            self._stops_later = True
