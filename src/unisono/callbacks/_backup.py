"""`BackupAndRestore`: a killed `fit` resumes at the exact next batch.

Keras' own callback of this name keeps weights and the number of the epoch. This one keeps what decides
every later number: weights, optimizer, metrics, random state, the position in the data, what the
other callbacks remember, and the history; together, atomically.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Literal

from unisono._errors import InvalidArgumentError
from unisono._system._environ import process_environ
from unisono._system._interrupts import in_main_thread
from unisono._system._object_store import place_of
from unisono._system._signals import RESTART_WANTED, SignalWatch
from unisono._types import Logs
from unisono.callbacks._backup_series import Backups
from unisono.callbacks._fit_backup import FitBackup
from unisono.callbacks._interval import BackupInterval
from unisono.checkpoint.commits import _commits
from unisono.checkpoint.preemption._save_consensus import SaveConsensus, consensus_of
from unisono.training._bind import wrap_keras
from unisono.training._binding import strategy_of, writes_files
from unisono.training._fit_extension import FitCall, FitExtension

_LOG = logging.getLogger("unisono")

#: A variable that tasks of `unisono launch` have.
_SUPERVISED = "UNISONO_FENCE"

# Also for models of no strategy: the callback takes part in `fit`.
wrap_keras()


class BackupAndRestore(FitExtension):
    """Saves all that training needs, and resumes from there when the same program starts again.

    After a kill at any moment, even while saving, the same command continues at the exact next batch
    after the last backup; on the same devices the final weights are bit for bit the weights of an
    undisturbed run. A backup is written beside training, flushed and checked; a damaged one is
    passed over with a warning, and the one before it is used. A backup that fails never ends training: a
    warning says what was not saved.

    The data must be the same: arrays, a `unisono.data.Dataset` (whose position is restored without
    reading what was used), a `PyDataset`, or a new generator (which is read up to the position).
    Other callbacks continue where they were: attributes that are numbers, strings and arrays are kept,
    or what `get_state()` returns.

    Args:
        backup_dir: a directory of this run alone, which the first of several workers reads and writes.
            One in memory, such as `/dev/shm/run-7`, survives the process and not the machine. Also one in an
            object store: `s3://bucket/run-7`, `gs://bucket/run-7`.
        save_freq: `"epoch"`, or after how many batches; 0 for only when asked (`save_now`, SIGTERM).
            `"auto"` measures the first backups and then saves as often as `max_overhead` allows; it
            says so in a line. None is `"auto"` under `unisono launch`, and else `"epoch"`, as in Keras.
        double_checkpoint: taken for Keras' sake; two are kept in any case.
        delete_checkpoint: whether the backups are deleted when `fit` has ended well; the last of those that
            are kept is the end of training.
        save_before_preemption: whether SIGTERM makes `fit` save after the running batch and end the
            program with code 42, for a supervisor that starts it again.
        max_to_keep: how many backups are kept, at least 2.
        asynchronous: whether training continues while a backup is written; if one is still being written
            when the next is due, the next is made as soon as it is done.
        max_overhead: with `"auto"`, the share of training that backups may take, such as 0.01: the time
            for which they stop it, and by which they slow the steps beside them.
        max_seconds: with `"auto"`, how many seconds of training a failure may cost at most, whatever
            the overhead is.

    Raises:
        InvalidArgumentError: when an argument cannot be used.
        CheckpointError: by `fit` before its first step, when the directory cannot be used, or its backups
            cannot be read.

    >>> import tempfile, keras, numpy as np
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> backup = BackupAndRestore(tempfile.mkdtemp())
    >>> history = model.fit(np.ones((40, 2)), np.ones(40), epochs=3, callbacks=[backup], verbose=0)
    >>> backup.saved
    3
    """

    #: All workers read them, one after the other, when one is saved.
    _reads_weights = False

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: Literal["epoch", "auto"] | int | None = None,
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        save_before_preemption: bool = False,
        *,
        max_to_keep: int = 2,
        asynchronous: bool = True,
        max_overhead: float = 0.01,
        max_seconds: float = 60.0,
    ) -> None:
        super().__init__()
        if save_freq is None:
            save_freq = "auto" if process_environ().get(_SUPERVISED) else "epoch"
        _check(str(backup_dir), save_freq, max_to_keep, max_overhead, max_seconds)
        self.backup_dir = place_of(backup_dir)
        self.save_freq = save_freq
        self.delete_checkpoint = delete_checkpoint
        self.saved = 0
        self._limits = max_overhead, max_seconds
        #: Saving after every batch needs each batch's state.
        self._sees_batches = save_freq == 1
        self._common = f"save_freq={save_freq}"
        self._keep = max_to_keep
        self._asynchronous = asynchronous
        self._handles_sigterm = save_before_preemption
        self._wanted = False
        self._signalled = False
        self._preempted = False
        self._batches = 0
        self._agreement: SaveConsensus | None = None
        #: Where all workers must read the state together: what one of them wants alone, they agree on.
        self._wishes: SaveConsensus | None = None
        self._run: FitBackup | None = None
        self._backups: Backups | None = None
        self._interval: BackupInterval | None = None

    def save_now(self) -> None:
        """Ask for a backup after the running batch."""
        self._wanted = True

    @contextlib.contextmanager
    def _around_fit(self, call: FitCall) -> Iterator[None]:
        """Restore before `fit` begins, and watch it."""
        writes = writes_files(call.model)
        strategy = strategy_of(call.model)
        self._signalled = self._preempted = False
        if self._handles_sigterm:
            # Also of several workers that train apart, each for itself.
            self._agreement = consensus_of(strategy.process_group) if strategy else SaveConsensus()
        replicated = None if strategy is None else strategy._replicated
        is_shared = replicated is not None and replicated.state_layout.needs_all
        self._wishes = consensus_of(replicated.process_group) if replicated and is_shared else None
        if not writes:
            _commits.check_place(self.backup_dir, writes=False)
        self._backups = Backups(self.backup_dir, self._keep, self._asynchronous, read_only=not writes)
        self._interval = self._interval_of(call) if writes and self.save_freq == "auto" else None
        every = self.save_freq if isinstance(self.save_freq, int) else 0
        try:
            self._run = FitBackup(
                self, call, self._backups, self._is_due, self._end_if_preempted, self._interval, every
            )
            with self._sigterm(), self._run.prepare():
                yield
                self._backups.wait()
                self._backups.finish(delete=self.delete_checkpoint)
        finally:
            if self._run is not None:
                self._run.unmute()
            self._backups.close()
            self.saved += self._backups.written
            self._run = self._backups = self._interval = None

    def _interval_of(self, call: FitCall) -> BackupInterval:
        """Only the worker that writes measures and decides: the others need not know."""
        verbose = call.arguments["verbose"]

        def say(text: str) -> None:
            if verbose in (0, "0"):
                _LOG.info("Decided: %s.", text)
            else:
                # A progress bar stands in the line.
                print(f"{'' if verbose == 2 else chr(10)}unisono: {text}", flush=True)

        return BackupInterval(*self._limits, max(1, call.model.steps_per_execution), say)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Runs before every other `on_epoch_begin`; Keras has just reset the metrics."""
        if self._run is not None:
            self._run.begin_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Runs before every other `on_train_batch_begin`, after all hooks of the batch before."""
        self._batches += 1
        # Steps may run ahead of Keras' loop: the state belongs to this batch only after the last of them.
        if self._run is not None and self._backups is not None and self._run.is_between:
            # All workers agree at the same batch, so that none waits in a collective for an ended one.
            if self._agree_on_preemption():
                self._backups.wait()
                self._wanted = True
            self._run.begin_batch(at_once=self._preempted)
            if self._run.is_saved:
                self._end_if_preempted()

    def _agree_on_preemption(self, *, is_last: bool = False) -> bool:
        """Return whether all workers end now; several ask each other now and then."""
        if self._agreement is not None and not self._preempted:
            step = self._agreement.agree(self._batches, self._signalled, is_last=is_last)
            self._preempted = step is not None
        return self._preempted

    def _end_if_preempted(self) -> None:
        """End the program if it is preempted; the state is saved, or is being written."""
        if self._preempted and self._agreement is not None and self._backups is not None:
            self._backups.wait()
            self._agreement.finish()
            # Not `raise`: the tasks that serve this program end with the same code.
            sys.exit(RESTART_WANTED)

    def on_test_begin(self, logs: Logs = None) -> None:
        """Pause step timing while validation runs."""
        if self._run is not None:
            self._run.pause()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Pause step timing; the epoch is saved after all other `on_epoch_end`."""
        if self._run is not None:
            self._run.pause()

    def _is_due(self, batches: int, epoch_ended: bool, is_last: bool) -> bool:
        backups = self._backups
        if backups is None:
            return False
        # After the last epoch no batch follows at whose beginning the workers could agree. And of an epoch of
        # one batch there is no state at the beginning of a batch: such an epoch is saved at its end.
        if (is_last or self._preempted) and self._agree_on_preemption(is_last=is_last):
            return True
        is_at_end = epoch_ended and self.save_freq == "epoch"
        in_number = isinstance(self.save_freq, int) and 0 < self.save_freq <= batches
        # If not, the next batch asks again.
        is_free = is_at_end or not backups.is_busy
        by_measure = self._interval is not None and self._interval.is_due(batches)
        # What is kept ends with the end of training.
        is_end = is_last and batches > 0 and bool(self.save_freq)
        is_kept = is_end and (not self.delete_checkpoint or backups.is_watched)
        wanted = is_kept or (is_free and (self._wanted or by_measure))
        if self._wishes is None:
            is_due = wanted or (is_free and (is_at_end or in_number))
        else:
            # The others do not know whether the first one is writing: it waits.
            is_due = is_at_end or in_number
            is_due |= self._wishes.agree(self._batches, wanted, is_last=epoch_ended) is not None
        self._wanted &= not is_due
        return is_due

    @contextlib.contextmanager
    def _sigterm(self) -> Iterator[None]:
        """Note SIGTERM while `fit` runs."""
        if not self._handles_sigterm:
            yield
            return
        if not in_main_thread():
            _LOG.warning(
                "`save_before_preemption` needs a `fit` in the main thread, where Python handles signals. "
                "Received: thread %r. SIGTERM will not make it save.",
                threading.current_thread().name,
            )
            yield
            return
        with SignalWatch(self._note_sigterm, signal.SIGTERM):
            yield
            if self._signalled and not self._preempted:
                _LOG.warning("SIGTERM arrived after the last epoch of `fit`, and the program continues.")

    def _note_sigterm(self) -> None:
        self._signalled = True


def _check(
    backup_dir: str, save_freq: str | int, max_to_keep: int, max_overhead: float, max_seconds: float
) -> None:
    if not backup_dir:
        raise InvalidArgumentError(
            "`backup_dir` must name a directory. Received: backup_dir=''. Write `BackupAndRestore('backup')`."
        )
    if save_freq not in ("epoch", "auto") and (type(save_freq) is not int or save_freq < 0):
        raise InvalidArgumentError(
            "`save_freq` must be 'auto', 'epoch' or a number of batches, 0 or more. "
            f"Received: save_freq={save_freq!r}. Write `save_freq=100`."
        )
    if max_to_keep < 2:
        raise InvalidArgumentError(
            "`max_to_keep` must be at least 2: if the newest backup is damaged, the one before serves. "
            f"Received: max_to_keep={max_to_keep}."
        )
    # Not `max_overhead <= 0`: that is false for nan.
    if not 0 < max_overhead <= 1:
        raise InvalidArgumentError(
            "`max_overhead` must be a share of training, above 0 and at most 1. "
            f"Received: max_overhead={max_overhead!r}. Write `max_overhead=0.01` for 1 %."
        )
    if not max_seconds > 0:
        raise InvalidArgumentError(
            "`max_seconds` must be a number of seconds above 0. "
            f"Received: max_seconds={max_seconds!r}. Write `max_seconds=60`."
        )
