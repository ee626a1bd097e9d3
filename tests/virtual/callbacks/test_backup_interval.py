"""`BackupAndRestore(save_freq="auto")`: how often it saves is measured, and changes no number."""

import re
import shutil
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest

import unisono
from unisono import InvalidArgumentError
from unisono.callbacks import BackupAndRestore
from unisono.checkpoint._writer import BackgroundWriter

ROWS, BATCH, TOGETHER = 960, 8, 2
MEMORY = Path("/dev/shm")


def trained(*callbacks, epochs=2, verbose=0, rows=ROWS):
    """The weights after a `fit` with dropout and shuffling."""
    keras.utils.set_random_seed(5)
    x = np.random.default_rng(0).normal(size=(rows, 6)).astype("f4")
    with unisono.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse", steps_per_execution=TOGETHER)
    model.fit(x, x.sum(1), batch_size=BATCH, epochs=epochs, verbose=verbose, callbacks=list(callbacks))
    return b"".join(w.tobytes() for w in model.get_weights())


@pytest.fixture(scope="module")
def expected():
    return trained()


@pytest.mark.parametrize("beside", [False, True])
def test_the_interval_is_printed_and_changes_no_number(tmp_path, capsys, expected, beside):
    backup = BackupAndRestore(tmp_path / "b", save_freq="auto", asynchronous=beside)
    assert trained(backup, verbose=0 if beside else 2) == expected
    assert backup.saved > 0
    printed = capsys.readouterr().out
    if beside:
        assert printed == ""
        return
    # Nothing is written beside training: four backups are measured in the first 40 executions.
    steps = re.findall(r"^unisono: a backup every (\d+) steps: state .*$", printed, re.M)
    assert steps
    assert all(int(number) % TOGETHER == 0 for number in steps)


def test_it_is_the_default_where_a_supervisor_starts_the_program_again(tmp_path, monkeypatch):
    assert BackupAndRestore(tmp_path).save_freq == "epoch"
    monkeypatch.setenv("UNISONO_FENCE", "fence")
    assert BackupAndRestore(tmp_path).save_freq == "auto"
    assert BackupAndRestore(tmp_path, "epoch").save_freq == "epoch"


def test_one_copy_of_the_state_at_a_time(tmp_path, monkeypatch):
    """Epochs end here faster than a backup is written: copies must not wait in a row."""
    submit, busy = BackgroundWriter.submit, []

    def watched(writer, job):
        busy.append(writer.is_busy)
        submit(writer, job)

    monkeypatch.setattr(BackgroundWriter, "submit", watched)
    trained(BackupAndRestore(tmp_path), epochs=6, rows=4 * BATCH)
    assert busy
    assert not any(busy)


@pytest.mark.skipif(not MEMORY.is_dir(), reason="no directory in memory")
def test_backups_in_memory_and_the_last_that_is_kept(caplog, expected):
    folder = Path(tempfile.mkdtemp(dir=MEMORY))
    try:
        trained(BackupAndRestore(folder, 1000, delete_checkpoint=False), epochs=1)
        with caplog.at_level("INFO", "unisono"):
            assert trained(BackupAndRestore(folder)) == expected
        assert f"Resuming from {folder / 'backup-1'}: epoch 2" in caplog.text
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_freq": "often"}, "save_freq='often'"),
        ({"save_freq": -1}, "save_freq=-1"),
        ({"save_freq": True}, "save_freq=True"),
        ({"save_freq": 1.5}, "save_freq=1.5"),
        ({"max_to_keep": 1}, "max_to_keep=1"),
        ({"max_overhead": 0}, "max_overhead=0"),
        ({"max_overhead": float("nan")}, "max_overhead=nan"),
        ({"max_overhead": 1.5}, "max_overhead=1.5"),
        ({"max_seconds": 0}, "max_seconds=0"),
        ({"max_seconds": float("nan")}, "max_seconds=nan"),
    ],
)
def test_arguments_that_cannot_be_used(tmp_path, arguments, message):
    with pytest.raises(InvalidArgumentError, match=f"Received: {re.escape(message)}"):
        BackupAndRestore(tmp_path, **arguments)
