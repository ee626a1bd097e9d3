"""Which of Keras' callbacks need no logs of batches."""

import keras
import pytest

from unisono.parameter_server.chief._fit_callbacks import epoch_callbacks


class Own(keras.callbacks.ModelCheckpoint):
    def on_test_batch_end(self, batch, logs=None):
        pass


class Reads(keras.callbacks.ModelCheckpoint):
    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)


class Renamed(keras.callbacks.ModelCheckpoint):
    pass


@pytest.mark.parametrize(
    ("make", "is_idle"),
    [
        (lambda path: keras.callbacks.ModelCheckpoint(path), True),
        (lambda path: Renamed(path), True),
        (lambda path: keras.callbacks.ModelCheckpoint(path, save_freq=10), False),
        (lambda path: keras.callbacks.BackupAndRestore(path), True),
        (lambda path: keras.callbacks.BackupAndRestore(path, save_freq=10), False),
        (lambda path: Own(path), False),
        (lambda path: Reads(path), False),
        (lambda path: keras.callbacks.TerminateOnNaN(), False),
    ],
)
def test_a_callback_that_saves_at_epochs_alone_needs_no_batch(make, is_idle):
    callback = make("a.keras")
    seen = []

    def fit():
        with epoch_callbacks([[callback], keras.callbacks.History()]):
            seen.append(getattr(callback, "async_safe", False))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit()
    assert seen == [is_idle]
    assert not hasattr(callback, "async_safe")
