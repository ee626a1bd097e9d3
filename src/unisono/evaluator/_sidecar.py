"""`SidecarEvaluator`: a task of its own evaluates new checkpoints beside training.

Source of the name: https://www.tensorflow.org/api_docs/python/tf/keras/experimental/SidecarEvaluator

Tests: tests/virtual/test_evaluator.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import signal
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from unisono import summary
from unisono._checks import is_number, whole_number
from unisono._errors import CheckpointError, CheckpointMismatchError, InvalidArgumentError
from unisono._system._environ import process_environ
from unisono._system._interrupts import in_main_thread
from unisono._system._object_store import given_place, place_of
from unisono._system._packages import require_packages
from unisono._system._signals import SignalWatch
from unisono._system._task_reports import heartbeat_of_environ
from unisono._types import Logs, PyTree
from unisono.checkpoint._markers import Mark, TrainingEnd, read_mark, record_path
from unisono.checkpoint.commits._commits import reached
from unisono.data._dataset import Dataset
from unisono.data._keras_input import as_keras_input
from unisono.evaluator._checkpoint_selection import (
    CheckpointEntry,
    Evaluate,
    Finish,
    FinishReason,
    View,
    Wait,
    next_action,
    signatures,
)
from unisono.evaluator._evaluation_history import Evaluation, EvaluationHistory, read_record, write_record
from unisono.evaluator._restoring import Restorer, list_checkpoints
from unisono.training._binding import strategy_of
from unisono.training._fit_extension import flat_callbacks

_LOG = logging.getLogger("unisono")

#: Seconds without a new checkpoint, where no launcher says whether training continues.
_TIMEOUT = 4 * 3600.0
#: How often a waiting evaluator looks whether a signal arrived, in seconds.
_SLICE = 0.1


class SidecarEvaluator:
    """Evaluates each new checkpoint of a directory, until training is over.

    For the task `evaluator` of a cluster, or any process of its own. The newest checkpoint is evaluated
    first, older ones are skipped, and none is evaluated twice, also after a restart. Of a
    checkpoint only the model's variables are restored; the optimizer's counter is set to the step, so
    that callbacks such as `TensorBoard` write at it.

    Args:
        model: built and compiled like the trained one; its optimizer may be another.
        data: what `evaluate` takes as `x`, or a tuple `(x, y)` or `(x, y, sample_weight)`.
        checkpoint_dir: where training saves: commits of `unisono.checkpoint` or `BackupAndRestore`, or
            the `.keras` and `.weights.h5` files of Keras' `ModelCheckpoint`.
        steps: batches of an evaluation; None for all.
        max_evaluations: how many evaluations to make, those before a restart included; None for all.
        callbacks: for `evaluate`.
        batch_size: for `evaluate`, where `data` are arrays.
        log_dir: TensorBoard's directory; results are written to `log_dir/<name>`.
        timeout: seconds to wait for a new checkpoint; by default four hours, or for ever below
            `unisono launch`, which says when training has ended.
        poll_interval: seconds between two looks at the directory.
        name: of this evaluator; another one for each that watches the same directory.

    Raises:
        InvalidArgumentError: naming the argument that cannot be used.

    >>> import tempfile
    >>> from unisono.checkpoint import Checkpoint, mark_finished
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    >>> model.compile("sgd", "mse")
    >>> directory = tempfile.mkdtemp()
    >>> _ = Checkpoint(model=model).save(directory + "/ckpt")
    >>> mark_finished(directory)
    >>> SidecarEvaluator(model, (np.ones((4, 2)), np.ones(4)), directory).start()
    checkpoint step 1: loss 1
    [(1, {'loss': 1.0})]
    """

    def __init__(
        self,
        model: keras.Model,
        data: PyTree,
        checkpoint_dir: str | os.PathLike[str],
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Any = None,
        *,
        batch_size: int | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        poll_interval: float = 1.0,
        name: str = "evaluator",
    ) -> None:
        _check_model(model)
        _check(name, data, checkpoint_dir)
        for what, value in (("max_evaluations", max_evaluations), ("steps", steps)):
            _check_positive(what, value, whole=True)
        for what, seconds in (("timeout", timeout), ("poll_interval", poll_interval)):
            _check_positive(what, seconds)
        self.model, self.data, self.steps = model, data, steps
        self.checkpoint_dir = place_of(checkpoint_dir)
        self.max_evaluations, self.callbacks = max_evaluations, flat_callbacks(callbacks)
        self._batch_size, self._name, self._poll = batch_size, name, poll_interval
        if log_dir is not None:
            require_packages("`log_dir`", "tensorboard", "tensorboard", "PIL")
        self._log_dir = None if log_dir is None else str(given_place(log_dir) / name)
        # Not its `is_reached`: this evaluator has other checkpoints, too, and obeys each mark once.
        self._finished = TrainingEnd(checkpoint_dir).launcher_file
        self._restarted = process_environ().get("UNISONO_GENERATION", "0") not in ("", "0")
        self._timeout = timeout if timeout is not None else math.inf if self._finished else _TIMEOUT
        self._heart = heartbeat_of_environ()
        self._asked = False
        #: Signatures of what was seen last, and before the last pause.
        self._now: dict[str, str] = {}
        self._before: dict[str, str] = {}
        self._mark: Mark | None = None

    def start(self) -> list[tuple[int, dict[str, Any]]]:
        """Evaluate until there is nothing more to evaluate.

        It ends when training is over and its last checkpoint is evaluated: the launcher says so, or the
        mark of `unisono.checkpoint.mark_finished`, which `BackupAndRestore` leaves; after `timeout`
        seconds without a new checkpoint; after `max_evaluations`; and on SIGTERM, at the next batch.

        Returns:
            The steps and results of all evaluations, those before a restart included.

        Raises:
            CheckpointMismatchError: a checkpoint is of another model; it names the variables.
            CheckpointError: the time is over and there never was a checkpoint, or an object store does not
                answer.
        """
        self._asked = False
        path = record_path(self.checkpoint_dir, self._name)
        record = read_record(path, self._restarted)
        # Also for `BackupAndRestore`, which then leaves its last backup.
        keeps = write_record(path, record)
        _LOG.info("%d evaluations were done before; watching %s.", len(record.evaluations), path.parent)
        restorer, began = Restorer(self.model), time.monotonic()
        with self._on_sigterm():
            with self._writer() as write:
                while True:
                    action = self._look(record, time.monotonic() - began)
                    if isinstance(action, Finish):
                        break
                    if isinstance(action, Evaluate):
                        with contextlib.suppress(_EvaluationStop):
                            self._take(action, record, restorer, write)
                        keeps = keeps and write_record(path, record)
                        began = time.monotonic()
                    else:
                        self._wait()
            self._end(action.reason, record)
            if keeps:
                write_record(path, record)
        return [(e.step, e.results) for e in record.evaluations]

    # --- looking ------------------------------------------------------------------------------

    def _look(self, record: EvaluationHistory, idle: float) -> Wait | Evaluate | Finish:
        # In this order: a checkpoint that appears between the two looks is listed, and so evaluated.
        finished = self._finished is not None and self._finished.exists()
        self._mark = read_mark(self.checkpoint_dir)
        with reached(self.checkpoint_dir):
            entries = list_checkpoints(self.checkpoint_dir)
        record.forget(f.name for f in entries)
        over = finished or (self._finished is None and _is_last(self._mark, entries, record.mark))
        self._now = signatures(entries)
        done = len(record.evaluations)
        view = View(entries, record.known, self._before, over, self._asked, done, idle)
        return next_action(view, self.max_evaluations, self._timeout)

    def _wait(self) -> None:
        # What is the same after the pause is not being written any more.
        self._before = self._now
        until = time.monotonic() + self._poll
        while not self._asked and (left := until - time.monotonic()) > 0:
            # Otherwise the launcher would take the evaluator for stalled.
            self._heart.beat()
            time.sleep(min(left, _SLICE))

    def _end(self, reason: FinishReason, record: EvaluationHistory) -> None:
        # Ended by SIGTERM, it resumes when it starts again: until then `BackupAndRestore` keeps a backup.
        record.watching = reason is FinishReason.ASKED
        if reason is FinishReason.FINISHED and self._mark is not None:
            record.mark = self._mark.name
        missing = reason in (FinishReason.FINISHED, FinishReason.TIMEOUT) and not record.evaluations
        if missing and reason is FinishReason.TIMEOUT:
            raise CheckpointError(
                f"A checkpoint must appear within {self._timeout:g} s. Received: none in "
                f"{self.checkpoint_dir}. Pass the directory into which training saves, or a longer `timeout`."
            )
        level = logging.WARNING if missing or reason is FinishReason.TIMEOUT else logging.INFO
        _LOG.log(
            level, "The evaluator of %s ends after %d evaluations: %s.",
            self.checkpoint_dir, len(record.evaluations), reason.value,
        )  # fmt: skip

    # --- evaluating ---------------------------------------------------------------------------

    def _take(
        self,
        take: Evaluate,
        record: EvaluationHistory,
        restorer: Restorer,
        write: Callable[[int, dict[str, Any]], None],
    ) -> None:
        """Evaluate a checkpoint, unless it cannot be read or was evaluated under another name."""
        chosen = take.chosen
        try:
            iterations = restorer.restore(self.checkpoint_dir / chosen.name)
        except CheckpointMismatchError:
            raise
        except CheckpointError as error:
            _LOG.warning("%s is left out. %s", chosen.name, error)
            record.known[chosen.name] = chosen.signature
            return
        # The counter stays at zero where the model's own optimizer did not train it.
        step = iterations or chosen.number or len(record.evaluations) + 1
        digest = _digest(self.model)
        if record.has(step, digest):
            _LOG.info("%s has the weights of step %d, which were evaluated.", chosen.name, step)
        else:
            results = self._evaluate(step)
            record.evaluations.append(Evaluation(step, results, chosen.name, digest))
            write(step, results)
            shown = " ".join(f"{name} {_short(value)}" for name, value in results.items())
            print(f"checkpoint step {step}: {shown}", flush=True)
        record.known |= signatures([chosen, *take.overtaken])
        if take.overtaken:
            names = ", ".join(f.name for f in take.overtaken)
            _LOG.info("Overtaken by %s, and not evaluated: %s.", chosen.name, names)

    def _evaluate(self, step: int) -> dict[str, Any]:
        for variable in getattr(self.model.optimizer, "variables", ()):
            if variable.name == "iteration":
                variable.assign(step)
        x, y, weights = keras.utils.unpack_x_y_sample_weight(self.data)
        if isinstance(x, Dataset) and strategy_of(self.model) is None:
            x = as_keras_input(x)
        results = self.model.evaluate(
            x=x, y=y, sample_weight=weights, batch_size=self._batch_size, steps=self.steps, verbose=0,
            callbacks=[_Interrupt(self._beat_or_stop), *self.callbacks], return_dict=True,
        )  # fmt: skip
        # JAX sorts names; readers look for the loss first.
        names = sorted(results, key=lambda name: name != "loss")
        return {name: np.asarray(results[name]).tolist() for name in names}

    def _beat_or_stop(self) -> bool:
        self._heart.beat()
        return self._asked

    @contextlib.contextmanager
    def _writer(self) -> Iterator[Callable[[int, dict[str, Any]], None]]:
        """Open a writer of results for TensorBoard, under the names of Keras' callback."""
        if self._log_dir is None:
            yield lambda step, results: None
            return
        writer = summary.create_file_writer(self._log_dir)

        def write(step: int, results: dict[str, Any]) -> None:
            for name, value in results.items():
                if np.ndim(value) == 0:
                    writer.write("scalar", f"evaluation_{name}_vs_iterations", step, np.asarray(value))
            writer.flush()

        try:
            yield write
        finally:
            writer.close()

    def _on_sigterm(self) -> contextlib.AbstractContextManager[object]:
        """Note SIGTERM while the evaluator is at work; in another thread than the main one, it cannot."""
        if not in_main_thread():
            return contextlib.nullcontext()
        return SignalWatch(self._ask_to_end, signal.SIGTERM)

    def _ask_to_end(self) -> None:
        self._asked = True


class _EvaluationStop(Exception):  # noqa: N818 (no error)
    """An evaluation was given up: its numbers do not cover all data."""


class _Interrupt(keras.callbacks.Callback):
    """Ends an evaluation at the next batch."""

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        super().__init__()
        self._is_wanted = is_wanted
        # It looks at no logs: Keras need not wait for them.
        self.async_safe = True

    def on_test_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Keras has emptied the variables: they are filled again before the end."""
        if self._is_wanted():
            self.model.jax_state_sync()
            raise _EvaluationStop


def _is_last(mark: Mark | None, entries: tuple[CheckpointEntry, ...], obeyed: str) -> bool:
    """Return whether a mark ends the watched run: no checkpoint followed, and no evaluator ended by it."""
    return mark is not None and mark.name != obeyed and all(f.time_ns <= mark.time_ns for f in entries)


def _digest(model: keras.Model) -> str:
    """A hash of the weights; the state of random generators, which evaluation may change, is left out."""
    state = hashlib.sha256()
    for variable in model.weights:
        state.update(np.ascontiguousarray(keras.ops.convert_to_numpy(variable)).tobytes())
    return state.hexdigest()


def _short(value: float | list[float]) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- arguments ---------------------------------------------------------------------------------


def _check_model(model: keras.Model) -> None:
    if not isinstance(model, keras.Model) or not model.built or not model.compiled:
        what = type(model).__name__
        if isinstance(model, keras.Model):
            what = f"{model.name!r}, which is not {'compiled' if model.built else 'built'}"
        raise InvalidArgumentError(
            f"An evaluator needs a Keras model that is built and compiled. Received: {what}. Write "
            "`keras.Input` as its first layer, or call `model.build(input_shape)`; then "
            "`model.compile(loss=..., metrics=[...])`."
        )


def _check(name: str, data: PyTree, checkpoint_dir: str | os.PathLike[str]) -> None:
    if isinstance(data, types.GeneratorType):
        raise InvalidArgumentError(
            "`data` must be readable again for each checkpoint. Received: a generator. Pass arrays, a "
            "`unisono.data.Dataset` or a `keras.utils.PyDataset`."
        )
    if not os.fspath(checkpoint_dir) or Path(checkpoint_dir).is_file():
        raise InvalidArgumentError(
            "`checkpoint_dir` must name the directory of the checkpoints. Received: "
            f"checkpoint_dir={os.fspath(checkpoint_dir)!r}. Write the directory of "
            "`ModelCheckpoint(filepath)`, or that of the `CheckpointManager`."
        )
    if not name or not name.replace("-", "").replace("_", "").isalnum():
        raise InvalidArgumentError(
            f"`name` must be letters, digits, '-' and '_'. Received: name={name!r}. Write `name='test'`."
        )


def _check_positive(what: str, value: float | None, whole: bool = False) -> None:
    if value is None:
        return
    if not is_number(value) or not value > 0 or (whole and whole_number(value, 1) is None):
        raise InvalidArgumentError(
            f"`{what}` must be {'an integer' if whole else 'seconds'} above 0. "
            f"Received: {what}={value!r}. Write `{what}=10`."
        )
