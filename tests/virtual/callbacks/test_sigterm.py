"""SIGTERM at every place of `fit`: the state is saved, the code is 42, the same program resumes exactly."""

import os
import signal
import threading

import keras
import numpy as np
import pytest

from unisono.callbacks import BackupAndRestore

ROWS = np.random.default_rng(0).normal(size=(24, 2)).astype("float32")


class Terminate(keras.callbacks.Callback):
    """Sends SIGTERM in the n-th call of a hook."""

    def __init__(self, hook, number):
        super().__init__()
        calls = iter(range(1, 99))

        def send(*args, **kwargs):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGTERM)

        setattr(self, hook, send)

    def get_state(self):
        return None

    def set_state(self, state):
        pass


def fit(folder, hook="on_train_begin", number=0, batch_size=8, **kwargs):
    """Three epochs; returns the final weights and the history."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    backup = BackupAndRestore(folder, **{"save_freq": 0, "save_before_preemption": True} | kwargs)
    callbacks = [Terminate(hook, number), backup]
    history = model.fit(
        ROWS, ROWS[:, :1], batch_size=batch_size, epochs=3, verbose=0, callbacks=callbacks,
        validation_data=(ROWS[:8], ROWS[:8, :1]),
    )  # fmt: skip
    return [w.tolist() for w in model.get_weights()], history.history


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return {size: fit(tmp_path_factory.mktemp("whole"), batch_size=size) for size in (8, 24)}


@pytest.mark.parametrize(
    ("hook", "number", "batch_size"),
    [
        ("on_train_begin", 1, 8),
        ("on_train_batch_end", 2, 8),
        ("on_test_begin", 1, 8),
        # Of the last epoch: no batch follows.
        ("on_train_batch_end", 9, 8),
        ("on_test_begin", 3, 8),
        ("on_epoch_end", 3, 8),
        # Epochs of one batch: none follows in its epoch.
        ("on_train_batch_end", 1, 24),
        ("on_epoch_end", 1, 24),
        ("on_epoch_begin", 3, 24),
    ],
)
def test_saved_wherever_it_arrives(tmp_path, undisturbed, hook, number, batch_size):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, hook, number, batch_size)
    assert ended.value.code == 42
    assert signal.getsignal(signal.SIGTERM) == before
    assert list(tmp_path.glob("backup-*"))
    assert fit(tmp_path, batch_size=batch_size) == undisturbed[batch_size]


def test_after_the_last_epoch_a_warning_says_that_the_program_continues(tmp_path, undisturbed, caplog):
    assert fit(tmp_path, "on_train_end", 1) == undisturbed[8]
    assert "SIGTERM arrived after the last epoch" in caplog.text


def test_the_programs_handler_is_called_when_the_state_is_saved(tmp_path):
    found = []
    before = signal.signal(
        signal.SIGTERM, lambda number, frame: found.append(list(tmp_path.glob("backup-*")))
    )
    try:
        with pytest.raises(SystemExit):
            fit(tmp_path, "on_train_batch_end", 2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [len(saved) for saved in found] == [1]


def test_in_another_thread_a_warning_says_that_sigterm_is_not_watched(tmp_path, undisturbed, caplog):
    results = []
    thread = threading.Thread(target=lambda: results.append(fit(tmp_path)), name="theirs")
    thread.start()
    thread.join()
    assert results == [undisturbed[8]]
    assert "main thread" in caplog.text
    assert "'theirs'" in caplog.text


def test_without_save_before_preemption_the_signal_is_left_alone(tmp_path):
    calls = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    try:
        fit(tmp_path, "on_train_batch_end", 2, save_before_preemption=False)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == [signal.SIGTERM]
