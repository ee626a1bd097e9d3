"""One call of `fit` with its backups: what `BackupAndRestore` does and when."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from unisono._errors import (
    CheckpointError,
    CheckpointMismatchError,
    InvalidArgumentError,
)
from unisono.callbacks._backup_series import Backups
from unisono.callbacks._callback_state import Made, check_same, names_of, set_state_of, state_of
from unisono.callbacks._counting_train_function import CountingTrainFunction, mute
from unisono.callbacks._data import (
    are_same,
    check_dataset,
    check_facts,
    check_sequence,
    facts_of,
    fingerprint,
    warn_of_other_batch,
)
from unisono.callbacks._interval import BackupInterval
from unisono.checkpoint._contents import Parts, Snapshot, copy_of
from unisono.checkpoint._json_state import decode, encode
from unisono.checkpoint._rng_state import RandomState
from unisono.data._dataset import Dataset
from unisono.data._keras_input import KerasInput, KerasStream, Position, as_keras_input
from unisono.strategies.multi_worker_fit._chief_callbacks import SameState, SharedDecisions
from unisono.training._binding import strategy_of
from unisono.training._fit_extension import FitCall
from unisono.training.trainer._lookahead import StepLog
from unisono.training.trainer._trainer_step import TrainerTask, variables_of

_LOG = logging.getLogger("unisono")

#: Batches that Keras or a device may be ahead of the step that is saved.
_READ_AHEAD = 64


@dataclasses.dataclass
class Progress:
    """Where a run of `fit` stands.

    Args:
        epoch: the epoch that goes on, from 0.
        batch: how many of its batches are done; 0 before its first.
        batches: how many batches were trained in all.
        stopped: whether a callback has ended training.
        epoch_random: the random state when the epoch began.
        random: the random state now.
        data: the state of the iteration over a `unisono.data.Dataset`.
        callbacks: what each callback remembers.
        callback_names: their classes.
        data_facts: what the data looks like, to notice other data.
        first_of_run: the fingerprint of the first batch of all.
        first_of_epoch: the fingerprint of the first batch of the epoch that goes on, or has just ended.
    """

    epoch: int = 0
    batch: int = 0
    batches: int = 0
    stopped: bool = False
    epoch_random: Any = None
    random: Any = None
    data: Any = None
    callbacks: list[Any] = dataclasses.field(default_factory=list)
    callback_names: list[str] = dataclasses.field(default_factory=list)
    data_facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    first_of_run: list[str] = dataclasses.field(default_factory=list)
    first_of_epoch: list[str] = dataclasses.field(default_factory=list)


class Last(keras.callbacks.Callback):
    """The last of all callbacks: hears when the others have heard."""

    def __init__(self, run: FitBackup) -> None:
        super().__init__()
        self._run = run

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras is about to train."""
        self._run.restore()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keras makes its iterator next."""
        self._run.epoch_begun()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """All others have seen the epoch's end, and the history has it."""
        self._run.end_epoch(epoch)


class FitBackup:
    """A call of `fit` with backups.

    Args:
        owner: the callback that users made.
        call: the arguments of `fit`.
        backups: where to save.
        is_due: from batches since the last backup, whether an epoch has ended, and whether it is the last,
            to whether to save.
        interval: measures how often to save, where that was asked for.
        every: after how many batches to save, where that was asked for.
    """

    def __init__(
        self,
        owner: Any,
        call: FitCall,
        backups: Backups,
        is_due: Callable[[int, bool, bool], bool],
        interval: BackupInterval | None = None,
        every: int = 0,
    ) -> None:
        self._call, self._model, self._backups, self._is_due = call, call.model, backups, is_due
        self._interval, self._every = interval, every
        self._random = RandomState()
        self._restored: tuple[Snapshot, Progress] | None = None
        self._progress = Progress()
        self._watched: CountingTrainFunction | None = None
        self._position: Position | None = None
        self._metrics: list[np.ndarray] = []
        self._unmute: Callable[[], None] | None = None
        self._random_now: Any = None
        self._saved_at = 0
        self._others = [c for c in call.callbacks if c is not owner]
        if not any(isinstance(c, keras.callbacks.History) for c in self._others):
            self._others.append(keras.callbacks.History())
        call.callbacks = [owner, *self._others, Last(self)]
        # What several workers need is no state: another number of them, or one, may go on.
        self._remembering = [c for c in self._others if not isinstance(c, (SameState, SharedDecisions))]
        self._made = [Made.of(c) for c in self._remembering]
        call.wraps.append(self._watch)

    # --- before fit -------------------------------------------------------------------------

    def prepare(self) -> None:
        """Find a backup and change the arguments of `fit` so that it goes on from there."""
        self._find_position()
        facts = facts_of(self._call.arguments, self._model.steps_per_execution, self._position)
        self._progress.data_facts = facts
        found = self._newest()
        if found is None:
            return
        path, snapshot = found
        progress = Progress(**decode(snapshot.facts["progress"], snapshot.arrays))
        self._keep_own_callbacks(progress)
        check_same(progress.callback_names, names_of(self._remembering))
        check_facts(progress.data_facts, facts, self._backups.directory)
        if not self._backups.read_only:
            # Of several workers the first: the others may have other parts of the data.
            self._check_content(progress)
        self._restored = snapshot, progress
        arguments = self._call.arguments
        arguments["initial_epoch"] = arguments["epochs"] if progress.stopped else progress.epoch
        self._move_data(progress)
        _LOG.info(
            "Going on from %s: epoch %d, %d of its batches are done, %d in all.",
            path, progress.epoch + 1, progress.batch, progress.batches,
        )  # fmt: skip

    def _newest(self) -> tuple[Path, Snapshot] | None:
        """The newest backup: of several workers the first reads, and tells the others."""
        strategy = strategy_of(self._model)
        if strategy is None or not strategy.mesh.is_spread:
            return self._backups.newest()
        found: list[tuple[Path, Snapshot] | None] = []

        def read() -> bytes:
            found.append(self._backups.newest())
            return b"" if found[0] is None else found[0][1].to_bytes()

        data = strategy.from_chief(read)
        if found:
            return found[0]
        return (self._backups.directory, Snapshot.from_bytes(data)) if data else None

    def _keep_own_callbacks(self, progress: Progress) -> None:
        """Leave out what the chief's callbacks remember that this worker does not have."""
        if not self._backups.read_only:
            return
        saved = list(zip(progress.callback_names, progress.callbacks, strict=True))
        kept = []
        for name in names_of(self._remembering):
            while saved and saved[0][0] != name:
                saved.pop(0)
            kept += saved[:1]
            saved = saved[1:]
        progress.callback_names = [name for name, _ in kept]
        progress.callbacks = [state for _, state in kept]

    def _find_position(self) -> None:
        arguments = self._call.arguments
        x, steps = arguments["x"], arguments["steps_per_epoch"]
        if isinstance(x, Dataset):
            x = arguments["x"] = as_keras_input(x)
            arguments["shuffle"] = False
        if isinstance(x, (KerasInput, KerasStream)):
            self._position = x.position
            self._position.keep_states(_READ_AHEAD * max(1, self._model.steps_per_execution))
        if steps is None or isinstance(x, types.GeneratorType):
            return
        if self._position is None or (self._position.is_finite and steps != x.num_batches):
            raise InvalidArgumentError(
                "With `BackupAndRestore`, `steps_per_epoch` needs data whose position can be restored, as an "
                f"epoch may begin anywhere in it. Received: steps_per_epoch={steps} and {type(x).__name__}. "
                "Pass a `unisono.data.Dataset` that ends with `repeat()`, or leave `steps_per_epoch` out."
            )

    def _check_content(self, progress: Progress) -> None:
        """Compare the data with those of the backup, where they can be read without using them up."""
        arguments, directory = self._call.arguments, self._backups.directory
        if self._position is not None:
            check_dataset(self._position.dataset, progress.first_of_run, directory)
        elif not progress.batch and progress.epoch:
            check_sequence(
                arguments["x"], arguments["shuffle"], progress.epoch_random["python"], progress.first_of_epoch
            )

    def _move_data(self, progress: Progress) -> None:
        """Make the data go on where the backup was made."""
        x = self._call.arguments["x"]
        if self._position is not None:
            if progress.batch or self._continues():
                self._position.resume_from(progress.data, progress.batch)
            else:
                self._position.resume_after(progress.data)
        elif isinstance(x, types.GeneratorType):
            # The batches of the running epoch are passed over later, like those of other data.
            for i in range(progress.batches - progress.batch):
                batch = next(x)
                if i == 0 and not are_same(progress.first_of_run, fingerprint(batch)):
                    warn_of_other_batch("generator")

    def _continues(self) -> bool:
        """Whether an epoch begins where the one before ended, in one iteration over the data."""
        if self._position is None or self._call.arguments["steps_per_epoch"] is None:
            return False
        return not self._position.is_finite

    # --- while fit runs ---------------------------------------------------------------------

    def _watch(self, function: Any) -> CountingTrainFunction:
        self._watched = CountingTrainFunction(
            function, self._model.steps_per_execution, self._position, self._every
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
        """Put the backup into the model and into the other callbacks, which have begun by now."""
        if self._position is not None:
            # So far Keras has only looked at a batch, to build the model.
            self._position.rewind()
        if self._restored is None:
            return
        snapshot, progress = self._restored
        names = [f"metrics/{i}" for i in range(len(self._model.metrics_variables))]
        metrics = {n: a for n, a in snapshot.arrays.items() if n.startswith("metrics/")}
        if set(names) != set(metrics):
            raise CheckpointMismatchError(
                "The model must have the metrics that were saved. Received: "
                f"{len(names)} metric variables, in the backup {len(metrics)}. Compile with the same ones, "
                f"or delete {self._backups.directory} to begin anew."
            )
        logs = {n: a for n, a in snapshot.arrays.items() if n.startswith("logs/")}
        weights = {n: a for n, a in snapshot.arrays.items() if n not in metrics and n not in logs}
        Parts({"model": self._model}).restore(Snapshot(weights, snapshot.facts))
        self._metrics = [np.asarray(metrics[n]) for n in names]
        for callback, state, made in zip(self._remembering, progress.callbacks, self._made, strict=True):
            for text in set_state_of(callback, state, made):
                name = type(callback).__name__
                _LOG.warning("%s goes on with the argument of the program: %s.", name, text)
        self._watching.batches = self._saved_at = progress.batches
        self._watching.first_of_run = progress.first_of_run
        # What an epoch ends with if all its batches were done before.
        self._watching.logs = {n.removeprefix("logs/"): a for n, a in logs.items()}
        self._random.set_state(progress.random)

    def begin_epoch(self, epoch: int) -> None:
        """Called first in an epoch, after Keras has reset the metrics."""
        self._watching.begin_epoch()
        self._progress.epoch = epoch
        restored, self._restored = self._restored, None
        if restored is None or not restored[1].batch:
            return
        progress = restored[1]
        for variable, value in zip(self._model.metrics_variables, self._metrics, strict=True):
            variable.assign(value)
        # The others heard of the beginning of this epoch, and of its first batches, before.
        self._unmute = mute(self._others)
        self._random.set_state(progress.epoch_random)
        self._random_now = progress.random
        self._watching.to_pass = progress.batch
        self._watching.expected = [] if self._position is not None else progress.first_of_epoch

    def unmute(self) -> None:
        """Let the other callbacks hear of batches again."""
        if self._unmute is not None:
            self._unmute()
            self._unmute = None

    def epoch_begun(self) -> None:
        """Called last when an epoch begins: Keras makes its iterator next."""
        self._progress.epoch_random = self._random.get_state()

    def begin_batch(self) -> None:
        """Called first in a batch: save the state after the one before, of which all have heard."""
        watched = self._watching
        if self._unmute is not None and not watched.to_pass:
            self.unmute()
            self._random.set_state(self._random_now)
        if self._interval is not None:
            self._interval.begin_batch(watched.batches, self._backups.is_busy, self._backups.last)
        done = watched.batches - self._saved_at
        if watched.state is None or not done or self._backups.is_busy or not self._is_due(done, False, False):
            return
        variables = variables_of(self._model, TrainerTask.TRAIN)
        values = {
            id(v): x
            for vs, xs in zip(variables, watched.state, strict=True)
            for v, x in zip(vs, xs, strict=True)
        }
        self._save(dataclasses.replace(self._progress, batch=watched.batches_in_epoch), values)

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
        """Called when no batch comes for a while: the epoch is over, or validation begins."""
        if self._interval is not None and self._watched is not None:
            self._interval.pause(self._watched.batches)

    def end_epoch(self, epoch: int) -> None:
        """Called last when an epoch has ended."""
        stopped = bool(self._model.stop_training)
        is_last = stopped or epoch + 1 >= self._call.arguments["epochs"]
        if not self._is_due(self._watching.batches - self._saved_at, True, is_last):
            return
        # One at a time: each that waits for the disk is a copy of the whole state.
        self._backups.wait()
        self._save(dataclasses.replace(self._progress, epoch=epoch + 1, batch=0, stopped=stopped), {})

    def _save(self, progress: Progress, values: dict[int, Any]) -> None:
        self._saved_at = self._watching.batches
        if self._backups.read_only:
            return
        with contextlib.nullcontext() if self._interval is None else self._interval.saving():
            self._backups.write(self._snapshot(progress, values))

    def _snapshot(self, progress: Progress, values: dict[int, Any]) -> Snapshot:
        """Copy everything; does not wait for the devices."""
        progress = dataclasses.replace(
            progress,
            batches=self._watching.batches,
            first_of_run=self._watching.first_of_run or [],
            first_of_epoch=self._watching.first,
            random=self._random.get_state(),
            data=None if self._position is None else self._position.state_after(self._watching.used),
            callbacks=[state_of(c, m) for c, m in zip(self._remembering, self._made, strict=True)],
            callback_names=names_of(self._remembering),
        )
        snapshot = Parts({"model": self._model}).snapshot(values)
        arrays = dict(snapshot.arrays)
        for i, variable in enumerate(self._model.metrics_variables):
            arrays[f"metrics/{i}"] = copy_of(values[id(variable)] if values else variable.value)
        if values and isinstance(self._watching.logs, dict):
            logs = {n: v.value if isinstance(v, StepLog) else v for n, v in self._watching.logs.items()}
            arrays |= {f"logs/{n}": copy_of(v) for n, v in logs.items() if hasattr(v, "shape")}
        fields = {f.name: getattr(progress, f.name) for f in dataclasses.fields(progress)}
        facts = {**snapshot.facts, "progress": encode(fields, arrays, "progress")}
        # As text now, so that no later change of what callbacks remember gets in.
        return Snapshot(arrays, json.loads(json.dumps(facts)))
