"""A training tells its launcher what `fit` trains, and its losses, without a read of its own."""

import json

import keras
import numpy as np
import pytest

import unisono
from unisono.callbacks import BackupAndRestore
from unisono.cluster.liveness import _task_events
from unisono.cluster.liveness._task_events import TaskEventFile
from unisono.training import _model_calls
from unisono.training.groups import _step_loop

X, Y = np.arange(40.0).reshape(20, 2) / 40, np.ones((20, 1))


@pytest.fixture
def events(tmp_path, monkeypatch):
    """The events of this process, as below a launcher, which are written at once."""
    made = TaskEventFile(tmp_path / "events.jsonl", 0)
    monkeypatch.setattr(_task_events, "_PERIOD", 0.0)
    for module in (_model_calls, _step_loop):
        monkeypatch.setattr(module, "process_events", lambda: made)
    return made


def train(**arguments):
    with unisono.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model.fit(X, Y, batch_size=8, verbose=0, **arguments)


def lines(tmp_path, name):
    written = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    return [line for line in written if line["event"] == name]


def test_a_fit_is_described_and_epochs_have_the_numbers_of_the_history(events, tmp_path):
    history = train(epochs=3, validation_split=0.2).history
    events.flush()
    (fit,) = lines(tmp_path, "fit")
    assert (fit["epochs"], fit["batches"], fit["epoch"], fit["step"]) == (3, 2, 0, 0)
    config = dict(fit["config"])
    names = ("strategy", "replicas", "global batch size", "optimizer", "loss")
    assert [config[name] for name in names] == ["MirroredStrategy", "2", "8", "SGD", "mse"]
    assert config["model"].endswith(", 3 weights")
    epochs = lines(tmp_path, "epoch")
    counts = [(line["epoch"], line["step"], line["batches"]) for line in epochs]
    assert counts == [(1, 2, 2), (2, 4, 2), (3, 6, 2)]
    for name in ("loss", "val_loss"):
        assert [line["logs"][name] for line in epochs] == history[name]
    # Losses within epochs, too: of these small steps the devices are done when the next line is written.
    within = lines(tmp_path, "logs")
    assert within
    assert {*within[0]["logs"]} == {"loss"}


def test_a_resumed_fit_counts_its_steps_from_where_the_run_began(events, tmp_path, monkeypatch):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise RuntimeError("stop")

    monkeypatch.setattr("unisono.callbacks._fit_backup.process_events", lambda: events)
    monkeypatch.setattr("unisono.callbacks._backup_series.process_events", lambda: events)
    with pytest.raises(RuntimeError, match="stop"):
        train(epochs=4, callbacks=[BackupAndRestore(tmp_path / "backup"), Stop()])
    events.step = 0  # as in another process
    train(epochs=4, callbacks=[BackupAndRestore(tmp_path / "backup")])
    events.flush()
    first, second = lines(tmp_path, "fit")
    assert (first["epoch"], first["step"], second["epoch"], second["step"]) == (0, 0, 1, 3)
    assert [line["step"] for line in lines(tmp_path, "epoch")][-1] == 12
    assert [line["step"] for line in lines(tmp_path, "backup")][:1] == [3]


def test_without_a_launcher_no_report_is_made(monkeypatch):
    assert not _model_calls.process_events().is_read
    load, asked = _model_calls.load, []
    monkeypatch.setattr(_model_calls, "load", lambda name: asked.append(name) or load(name))
    train()
    assert "report of a fit" not in asked
