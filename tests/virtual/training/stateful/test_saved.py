"""Backups and checkpoints of models whose steps use optimizers under names of their own."""

import keras
import numpy as np
import pytest

import unisono
from tests.virtual.training.stateful._models import gan, rows, weights_of
from unisono import tf

DATA = rows(3, 4, count=16)
OPTIONS = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


class _StoppedError(Exception):
    pass


class Stops(keras.callbacks.Callback):
    """Ends the training within the second epoch, if it is to."""

    def __init__(self, stops):
        super().__init__()
        self.stops = stops

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if self.stops and (self.epoch, batch) == (1, 1):
            raise _StoppedError


def everything(model):
    slots = [*model.optimizers["d"][0].variables, *model.optimizers["g"].variables]
    return [*weights_of(model), *(np.asarray(v.value) for v in slots)]


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_run_goes_on_from_its_backup_and_a_model_from_a_checkpoint(tmp_path):
    undisturbed = gan()
    history = undisturbed.fit(*DATA, **OPTIONS).history

    def fit(stops):
        model, backup = gan(), unisono.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=1)
        return model, model.fit(*DATA, callbacks=[backup, Stops(stops)], **OPTIONS).history

    with pytest.raises(_StoppedError):
        fit(stops=True)
    model, found = fit(stops=False)
    assert found == history
    assert_equal(everything(model), everything(undisturbed))

    # Into a model that its first step builds, as `tf.train.Checkpoint` does.
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    restored = gan()
    status = tf.train.Checkpoint(model=restored).restore(path)
    for each in (model, restored):
        each.train_on_batch(*(x[:8] for x in DATA))
    status.assert_consumed()
    assert_equal(everything(restored), everything(model))
