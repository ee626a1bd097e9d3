"""Nothing that a backup does ends a training: each call to the disk, or to the store, fails in turn."""

import contextlib
import json
import shutil
import threading

import fsspec
import keras
import numpy as np
import pytest
from tests.failing_files import failing_calls

from unisono import CheckpointError
from unisono._system._object_store import place_of
from unisono.callbacks import BackupAndRestore
from unisono.checkpoint._markers import record_path

ROWS = np.arange(24, dtype="float32").reshape(12, 2) / 24


class Begins(keras.callbacks.Callback):
    """Calls a function when training begins, behind all that is restored."""

    def __init__(self, function):
        super().__init__()
        self._function = function

    def on_train_begin(self, logs=None):
        self._function()


class Trained:
    """A model that is trained again and again from the same state: it is compiled once."""

    def __init__(self):
        keras.utils.set_random_seed(0)
        self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        self.model.compile("sgd", "mse")
        self.model.optimizer.build(self.model.trainable_variables)
        self._before = [v.numpy() for v in self._state]
        self.wanted = self.fit([])

    @property
    def _state(self):
        return [*self.model.variables, *self.model.optimizer.variables]

    def fit(self, callbacks):
        """Two epochs of three batches; returns weights and losses."""
        for variable, value in zip(self._state, self._before, strict=True):
            variable.assign(value)
        arguments = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        history = self.model.fit(ROWS, ROWS[:, :1], callbacks=callbacks, **arguments).history
        return [v.numpy().tolist() for v in self._state], history


@pytest.fixture(scope="module")
def trained():
    return Trained()


def empty(folder):
    """Delete a folder with all that is in it."""
    if isinstance(place_of(folder), type(place_of("/"))):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        fsspec.filesystem("memory").store.clear()


def watch(folder):
    """Leave what an evaluator does that reads a folder."""
    place = place_of(folder)
    place.mkdir(parents=True, exist_ok=True)
    record = record_path(place, "test")
    text = json.dumps({"watching": True})
    record.write_text(text) if hasattr(record, "write_text") else record.write_bytes(text.encode())


#: Which backups are made, and whether an evaluator reads them.
CASES = {
    "batches": ({"save_freq": 2}, False),
    "epochs, kept": ({"save_freq": "epoch", "delete_checkpoint": False}, False),
    "epochs, watched": ({"save_freq": "epoch"}, True),
    "beside training": ({"save_freq": 1, "asynchronous": True}, False),
}

#: With which words warnings begin.
SAID = (
    "The backup after ",
    "Backups in ",
    "Older backups in ",
    "Whether an evaluator ",
    "The end of training ",
)


def exhaustive(*values):
    return pytest.param(*values, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("where", "case", "once"),
    [
        ("memory", "batches", True),
        ("memory", "epochs, kept", False),
        ("disk", "epochs, kept", False),
        exhaustive("memory", "batches", False),
        exhaustive("memory", "epochs, kept", True),
        exhaustive("memory", "epochs, watched", True),
        exhaustive("memory", "beside training", True),
        exhaustive("disk", "batches", True),
        exhaustive("disk", "batches", False),
        exhaustive("disk", "epochs, kept", True),
        exhaustive("disk", "epochs, watched", True),
        exhaustive("disk", "beside training", True),
    ],
)
def test_each_call_fails_in_turn(trained, tmp_path, caplog, where, case, once):
    """Training ends with the right weights, and a warning names what was not saved or not deleted."""
    folder = str(tmp_path / "run") if where == "disk" else "memory://failing/run"
    options, is_watched = CASES[case]
    options = {"asynchronous": False, **options}
    with failing_calls(folder) as calls:

        def fit(first):
            empty(folder)
            if is_watched:
                watch(folder)
            backup = BackupAndRestore(folder, **options)
            found = trained.fit([backup, Begins(lambda: calls.begin(first, once))])
            calls.end()
            assert found == trained.wanted, first
            return backup.saved

        saved, number = fit(0), 0
        assert caplog.messages == []
        while (number := number + 1) <= calls.count:
            lost = saved - fit(number)
            # Beside training others are made, or fewer, as time allows.
            assert caplog.messages or not lost or options["asynchronous"], number
            assert len(caplog.messages) <= 1 or not once, caplog.messages
            for text in caplog.messages:
                assert text.startswith(SAID)
                assert "the token has expired" in text, text
            caplog.clear()
    assert number > 10


def test_before_training_a_failure_is_an_error(trained):
    """Of all calls: what cannot be seen may be the state to resume from. None of the weights has changed."""
    folder = "memory://failing/run"
    with failing_calls(folder) as calls:
        number, is_begun = 0, False
        while not is_begun:
            number += 1
            empty(folder)
            (place_of(folder) / "FINISHED").write_bytes(b'{"name": "earlier", "discard": true}')
            begun = []
            calls.begin(number, once=False)
            with contextlib.suppress(CheckpointError):
                trained.fit([BackupAndRestore(folder), Begins(lambda begun=begun: begun.append(1))])
            is_begun = bool(begun)
            calls.end()
    assert number > 4


class Forgets(keras.callbacks.Callback):
    """A callback whose state cannot be had."""

    def get_state(self):
        raise LookupError("no such state")

    def set_state(self, state):
        """Never called."""


def test_what_a_callback_raises_when_it_is_saved_ends_no_training(trained, tmp_path, caplog):
    backup = BackupAndRestore(tmp_path)
    assert trained.fit([backup, Forgets()]) == trained.wanted
    assert backup.saved == 0
    first, second = caplog.messages
    assert first.startswith("The backup after 3 batches could not be written")
    assert second.startswith("The backup after 6 batches could not be written")
    assert first.endswith("LookupError: no such state")


def test_a_thread_that_cannot_be_started_ends_no_training(trained, tmp_path, caplog, monkeypatch):
    start = threading.Thread.start

    def failing(thread):
        if thread.name == "unisono-backup":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    assert trained.fit([BackupAndRestore(tmp_path, "epoch")]) == trained.wanted
    assert [text[:24] for text in caplog.messages] == ["The backup after 3 batch", "The backup after 6 batch"]
