"""One call of `fit` with its backups: what `BackupAndRestore` does and when.

The user's `BackupAndRestore` becomes the first of all callbacks, and a `LastCallback` is added behind all
others. What the two call, in this order ("others" are the program's callbacks between them):

    prepare()                           before Keras' `fit`: find a backup, move the data to it
    on_train_begin        others
                          last    restore()            weights, optimizer, callbacks, random state
    for each epoch:
      on_epoch_begin      first   begin_epoch()        Keras has reset the metrics: set them
                          others
                          last    keep_epoch_random()  Keras makes its iterator next, which may draw
      for each batch:
        on_train_batch_begin
                          first   begin_batch()        save the state after the batch before
                          others
        on_train_batch_end
                          others
      on_test_begin       first   pause()              validation is not a step
      on_epoch_end        first   pause()
                          others
                          last    end_epoch()          save the state after the epoch
    unmute()                            after Keras' `fit`, also where it raised

A batch is saved at the beginning of the next one: only then have all callbacks seen its end, and what they
remember belongs to the same batch as the weights.

Tests: tests/virtual/callbacks/test_resume.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import keras
import numpy as np

from unisono._errors import CheckpointError
from unisono._system._object_store import Place
from unisono._system._task_reports import process_events
from unisono._types import Logs, PyTree, State
from unisono.callbacks._backup_series import Backups
from unisono.callbacks._callback_state import CallbackBaseline, names_of, set_state_of, state_of
from unisono.callbacks._counting_train_function import CountingTrainFunction, mute
from unisono.callbacks._fit_progress import (
    Progress,
    local_phase_in,
    progress_in,
    restore_model,
    snapshot_of,
)
from unisono.callbacks._interval import BackupInterval
from unisono.callbacks._resumable_data import ResumableData, check_facts
from unisono.checkpoint._arrays import read_along
from unisono.checkpoint._contents import Parts
from unisono.checkpoint._rng_state import RandomState
from unisono.checkpoint._snapshot import Snapshot
from unisono.step._keras_internals import epochs_before, is_synced
from unisono.step._value_handle import ValueHandle
from unisono.training._binding import phases_of, strategy_of
from unisono.training._fit_extension import FitCall
from unisono.training.trainer._protocol import set_usual_rows, usual_rows_of
from unisono.training.trainer._trainer_step import TrainerTask, variables_of

_LOG = logging.getLogger("unisono")


class LastCallback(keras.callbacks.Callback):
    """The last of all callbacks, called after all others."""

    def __init__(self, backup: FitBackup) -> None:
        super().__init__()
        self._backup = backup

    def on_train_begin(self, logs: Logs = None) -> None:
        """Keras is about to train."""
        self._backup.restore()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Keras makes its iterator next."""
        self._backup.keep_epoch_random()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """All others have seen the epoch's end, and the history has it."""
        self._backup.end_epoch(epoch)


class FitBackup:
    """A call of `fit` with backups.

    Args:
        is_due: from batches since the last backup, whether an epoch has ended, and whether it is the last,
            to whether to save.
        on_epoch_saved: called when the state after an epoch is saved, or being written.
        interval: measures how often to save, where that was asked for.
        every: after how many batches to save, where that was asked for.
    """

    def __init__(
        self,
        owner: keras.callbacks.Callback,
        call: FitCall,
        backups: Backups,
        is_due: Callable[[int, bool, bool], bool],
        on_epoch_saved: Callable[[], None],
        interval: BackupInterval | None = None,
        every: int = 0,
    ) -> None:
        self._call, self._model, self._backups, self._is_due = call, call.model, backups, is_due
        self._on_epoch_saved, self._interval, self._every = on_epoch_saved, interval, every
        self._random = RandomState()
        self._restored: tuple[Snapshot, Progress] | None = None
        self._progress = Progress()
        self._watched: CountingTrainFunction | None = None
        self._metrics: list[np.ndarray] = []
        self._phases = phases_of(self._model)
        #: What replicas held apart when the backup was made, until it is resumed.
        self._local: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._unmute: Callable[[], None] | None = None
        #: Keras' progress bar, where epochs are passed over in which it is to show nothing.
        self._bars: list[keras.callbacks.Callback] = []
        self._random_now: State = None
        self._saved_at = 0
        self._data = ResumableData(call.arguments, self._model.steps_per_execution)
        self._others = [c for c in call.callbacks if c is not owner]
        if not any(isinstance(c, keras.callbacks.History) for c in self._others):
            # Keras would add its own behind `LastCallback`: a backup would lack the epoch that just ended.
            self._others.append(keras.callbacks.History())
        call.callbacks = [owner, *self._others, LastCallback(self)]
        # Other numbers of workers resume a backup.
        self._remembering = [c for c in self._others if not getattr(c, "is_of_workers", False)]
        self._made = [CallbackBaseline.of(c) for c in self._remembering]
        call.wraps.append(self._watch)

    # --- before fit -------------------------------------------------------------------------

    def prepare(self) -> contextlib.AbstractContextManager[None]:
        """Find a backup and change the arguments of `fit` to resume from there; return the context for it."""
        self._progress.data_facts = self._data.facts()
        with process_events().span("restore"):
            found = self._newest()
        if found is None:
            return contextlib.nullcontext()
        path, snapshot = found
        progress = progress_in(snapshot)
        self._match_callbacks(progress)
        check_facts(progress.data_facts, self._facts_to_compare(progress), self._backups.directory)
        if not self._backups.read_only:
            # Of several workers the first: the others may have other parts of the data.
            self._data.check_content(progress, self._backups.directory)
        self._restored = snapshot, progress
        arguments = self._call.arguments
        # Keras' loop takes an iteration over the data from its beginning, which may lie in an earlier epoch.
        first = progress.first_epoch if self._data.is_inside(progress) else progress.epoch
        before = max(0, first - arguments["initial_epoch"])
        # A run that a callback has stopped does not train again.
        arguments["initial_epoch"] = arguments["epochs"] if progress.stopped else first
        if first < progress.epoch:
            self._pass_epochs(progress.epoch)
        self._data.resume(progress)
        _LOG.info(
            "Resuming from %s: epoch %d, %d of its batches are done, %d in all.",
            path, progress.epoch + 1, progress.batch, progress.batches,
        )  # fmt: skip
        return epochs_before(self._model, before)

    def _pass_epochs(self, epoch: int) -> None:
        """Let Keras pass over the epochs before one: without validation, and without a progress bar."""
        arguments = self._call.arguments
        every = arguments["validation_freq"]
        arguments["validation_freq"] = [
            n
            for n in range(epoch + 1, arguments["epochs"] + 1)
            if (n % every == 0 if isinstance(every, int) else n in every)
        ]
        if arguments["verbose"] not in (0, "0"):
            # Keras makes none of its own then.
            self._bars = [keras.callbacks.ProgbarLogger()]
            self._call.callbacks[-1:-1] = self._bars

    def _newest(self) -> tuple[Place, Snapshot] | None:
        """Return the newest backup; the first of several workers reads it and sends it to the others."""
        strategy = strategy_of(self._model)
        if strategy is None:
            return self._backups.begin()
        group = strategy.process_group
        # Also the directory is made ready there: if that fails on the first worker, the others end with it.
        found = group.value_of_chief(
            self._backups.begin,
            lambda found: b"" if found is None else found[1].to_bytes(),
            lambda data: (self._backups.directory, Snapshot.from_bytes(data, group)) if data else None,
        )
        return None if found is None else (found[0], found[1].sent(group) if group.is_chief else found[1])

    def _facts_to_compare(self, progress: Progress) -> dict[str, Any]:
        """Return what must be as it was: another number of steps may fit the position."""
        facts, saved = self._progress.data_facts, progress.data_facts.get("steps_per_execution")
        steps, now = facts["steps_per_epoch"] or 0, facts["steps_per_execution"]
        if not saved or progress.batch % now or steps % saved or steps % now:
            return facts
        return {**facts, "steps_per_execution": saved}

    def _match_callbacks(self, progress: Progress) -> None:
        """Give each callback what one of its class remembered, in their order, or None."""
        saved: dict[str, list[State]] = {}
        for name, state in zip(progress.callback_names, progress.callbacks, strict=True):
            saved.setdefault(name, []).append(state)
        names = names_of(self._remembering)
        progress.callbacks = [saved[name].pop(0) if saved.get(name) else None for name in names]
        progress.callback_names = names
        gone = [name for name, states in saved.items() if states]
        new = [name for name, state in zip(names, progress.callbacks, strict=True) if state is None]
        # Of several workers the chief has callbacks of its own.
        if (gone or new) and not self._backups.read_only:
            text = f"The backup in {self._backups.directory} was made by a `fit` with other callbacks."
            if new:
                text += f" It has no state of these, which start without one: {', '.join(new)}."
            if gone:
                text += f" It has states of these, which this `fit` lacks: {', '.join(gone)}."
            _LOG.warning(text)

    # --- while fit runs ---------------------------------------------------------------------

    def _watch(self, function: Callable[..., tuple[PyTree, PyTree]]) -> CountingTrainFunction:
        self._watched = CountingTrainFunction(
            function,
            self._model.steps_per_execution,
            self._data.position,
            self._phases,
            self._every,
            self._data.shared_size,
        )
        return self._watched

    @property
    def _watching(self) -> CountingTrainFunction:
        if self._watched is None:
            raise CheckpointError(
                "A backup needs a running `fit`. Received: none. Pass the callback to `fit`."
            )
        return self._watched

    def restore(self) -> None:
        """Put the backup into the model and the other callbacks, whose `on_train_begin` has run."""
        self._data.rewind()
        if self._restored is None:
            return
        snapshot, progress = self._restored
        self._metrics, logs = restore_model(self._model, snapshot, self._backups.directory)
        self._phases.begin(self._model)
        self._local = local_phase_in(snapshot)
        for callback, state, made in zip(self._remembering, progress.callbacks, self._made, strict=True):
            for text in () if state is None else set_state_of(callback, state, made):
                name = type(callback).__name__
                _LOG.warning("%s continues with the argument of the program: %s.", name, text)
        self._watching.batches = self._saved_at = progress.batches
        process_events().begin_at(progress.batches)
        self._watching.first_of_run = progress.first_of_run
        # The first batch may be the ragged last one of its epoch.
        set_usual_rows(self._watching, progress.usual_rows)
        # What an epoch ends with if all its batches were done before.
        self._watching.logs = logs
        self._random.set_state(progress.random)

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch: its metrics, and the batches to pass over; the first call of its hook."""
        self._watching.begin_epoch()
        self._progress.epoch = epoch
        if self._restored is None:
            return
        progress = self._restored[1]
        is_inside = self._data.is_inside(progress)
        is_past = epoch < progress.epoch
        if not (is_inside or progress.batch):
            self._restored = None
            return
        if self._unmute is None:
            # Keras makes its iterator next, and must shuffle as it did then.
            self._random.set_state(progress.epoch_random)
            self._random_now = progress.random
            self._watching.to_pass = progress.used if is_inside else progress.batch
            self._watching.expected = [] if self._data.position is not None else progress.first_of_epoch
        # For the other callbacks, the begin of this epoch and its first batches are in the past.
        self.unmute()
        if is_past:
            self._unmute = mute([*self._others, *self._bars], is_whole=True)
            return
        self._restored = None
        if not progress.batch:
            self._random.set_state(self._random_now)
            return
        self._unmute = mute(self._others)
        for variable, value in zip(self._model.metrics_variables, self._metrics, strict=True):
            variable.assign(value)
        # After the last of these values: it belongs to them.
        if self._local is not None:
            self._phases.resume(self._model, *self._local)
        self._local = None

    def unmute(self) -> None:
        """Call the other callbacks' hooks again."""
        if self._unmute is not None:
            self._unmute()
            self._unmute = None

    def keep_epoch_random(self) -> None:
        """Keep the random state with which Keras is about to make its iterator; the last call of its hook."""
        # Unless the iteration of the epoch before goes on.
        if self._data.shared_size is None or not self._watching.used:
            self._progress.first_epoch = self._progress.epoch
            self._progress.epoch_random = self._random.get_state()

    def begin_batch(self, *, at_once: bool = False) -> None:
        """Save the state after the batch before if a backup is due; the first call of its hook.

        Args:
            at_once: whether it is saved also within a phase of replicas that train apart.
        """
        watched = self._watching
        if self._unmute is not None and not watched.to_pass and self._restored is None:
            self.unmute()
            # Passing over batches drew other numbers; from here on those of the undisturbed run follow.
            self._random.set_state(self._random_now)
        if self._interval is not None:
            self._interval.begin_batch(watched.batches, self._backups.is_busy, self._backups.last)
        done = watched.batches - self._saved_at
        if watched.state is None or not done:
            return
        if (self._phases.is_in_phase(self._model) and not at_once) or not self._is_due(done, False, False):
            return
        # One at a time, also where all workers must save now.
        self._backups.wait()
        variables = variables_of(self._model, TrainerTask.TRAIN)
        # While Keras trains, the model's variables are empty, and the running state has their values; but a
        # callback that has read or changed them since has filled them.
        values = (
            {}
            if is_synced(self._model)
            else {
                id(v): x
                for vs, xs in zip(variables, watched.state, strict=True)
                for v, x in zip(vs, xs, strict=True)
            }
        )
        local, arrays = self._phases.to_parts(self._model)
        progress = dataclasses.replace(self._progress, batch=watched.batches_in_epoch, local=local)
        self._save(progress, values, arrays)

    @property
    def is_saved(self) -> bool:
        """Whether the state after the batch before is saved, or being saved; alike on all workers."""
        watched = self._watching
        return watched.state is not None and watched.batches == self._saved_at

    @property
    def is_between(self) -> bool:
        """Whether the state after the batch before is there to be saved; alike on all workers."""
        return self._watching.is_between

    def pause(self) -> None:
        """Pause step timing: the epoch is over, or validation begins."""
        if self._interval is not None and self._watched is not None:
            self._interval.pause(self._watched.batches)

    def end_epoch(self, epoch: int) -> None:
        """Save the state after an epoch if a backup is due; the last call of its hook."""
        if self._restored is not None:
            # An epoch that was passed over.
            return
        stopped = bool(self._model.stop_training)
        is_last = stopped or epoch + 1 >= self._call.arguments["epochs"]
        if not self._is_due(self._watching.batches - self._saved_at, True, is_last):
            return
        # One at a time: each that waits for the disk is a copy of the whole state.
        self._backups.wait()
        self._save(dataclasses.replace(self._progress, epoch=epoch + 1, batch=0, stopped=stopped), {})
        self._on_epoch_saved()

    def _save(
        self,
        progress: Progress,
        values: dict[int, jax.Array],
        local: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        # Also on workers that do not write: `is_saved` must be alike on all.
        batches = self._saved_at = self._watching.batches
        with contextlib.nullcontext() if self._interval is None else self._interval.saving():
            snapshot = None if self._backups.read_only else self._snapshot_or_none(progress, values, local)
            if snapshot is not None:
                self._backups.write(snapshot, batches)
            else:
                # With the first worker, or with the others where the first one fails.
                apart = {name: x for name, x in local.items() if isinstance(x, ValueHandle) and x.needs_all}
                read_along(Parts({"model": self._model}).shared(values) | apart)

    def _snapshot_or_none(
        self, progress: Progress, values: dict[int, jax.Array], local: Mapping[str, Any]
    ) -> Snapshot | None:
        """Copy everything; return None where that fails, as in `get_state` of a callback."""
        with self._backups.writing(self._saved_at):
            return self._snapshot(progress, values, local)
        return None

    def _snapshot(
        self, progress: Progress, values: dict[int, jax.Array], local: Mapping[str, Any]
    ) -> Snapshot:
        """Copy everything; does not wait for the devices."""
        progress = dataclasses.replace(
            progress,
            batches=self._watching.batches,
            first_of_run=self._watching.first_of_run or [],
            first_of_epoch=self._watching.first,
            usual_rows=usual_rows_of(self._watching),
            used=0 if self._data.shared_size is None else self._watching.used,
            random=self._random.get_state(),
            data=self._data.state_after(self._watching.used),
            callbacks=[state_of(c, m) for c, m in zip(self._remembering, self._made, strict=True)],
            callback_names=names_of(self._remembering),
        )
        logs = self._watching.logs if progress.batch else None
        return snapshot_of(self._model, progress, values, logs, local)
