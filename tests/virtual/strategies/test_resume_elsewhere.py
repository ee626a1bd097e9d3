"""A `fit` resumes on every number of replicas, whatever the layout of the state and the sync are."""

import shutil

import keras
import numpy as np
import pytest

import unisono
from tests.support import devices
from unisono import CompressedAllReduce, LocalUpdates
from unisono.callbacks import BackupAndRestore

pytestmark = pytest.mark.numbers

ROWS = np.random.default_rng(0).normal(size=(36, 4)).astype("float32")
REPLICAS = (1, 2, 3)


def outer():
    return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)


#: Arguments of a strategy. Three epochs of six steps; a phase of four ends within each of them.
OPTIONS = {
    "mirrored": {},
    "sharded": {"state_layout": "sharded"},
    "fully sharded": {"state_layout": "fully_sharded"},
    "compressed": {"cross_device_ops": CompressedAllReduce("int8")},
    "compressed, sharded": {"cross_device_ops": CompressedAllReduce(), "state_layout": "sharded"},
    "compressed, fully sharded": {"cross_device_ops": CompressedAllReduce(), "state_layout": "fully_sharded"},
    "local": {"sync": LocalUpdates(4, outer)},
    "local, mean": {"sync": LocalUpdates(4)},
    "fragments": {"sync": LocalUpdates(4, outer, fragments=2)},
    "overlap": {"sync": LocalUpdates(4, outer, overlap=3)},
    "fragments, overlap": {"sync": LocalUpdates(4, outer, fragments=2, overlap=1)},
}


class Stop(Exception):
    """Raised in place of a failure."""


class Fails(keras.callbacks.Callback):
    """Fails within the second epoch."""

    def __init__(self, never=False):
        super().__init__()
        self._number = 0 if never else 11

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == self._number:
            raise Stop

    def get_state(self):
        return {}

    def set_state(self, state):
        """When it fails is an argument."""


class Trained:
    """A model for each number of replicas: it is compiled once, and trained again from the same state."""

    def __init__(self, options):
        self._models = {}
        for replicas in REPLICAS:
            keras.utils.set_random_seed(0)
            with unisono.MirroredStrategy(devices(replicas), **options).scope():
                # Its statistics are those of a replica's rows: not where numbers are compared.
                normal = [keras.layers.BatchNormalization()] if "sync" in options else []
                layers = [keras.layers.Dense(3), *normal, keras.layers.Dense(1)]
                model = keras.Sequential([keras.Input((4,)), *layers])
                model.compile("adam", "mse")
                model.optimizer.build(model.trainable_variables)
            self._models[replicas] = model, [np.asarray(v) for v in self._state(model)]

    @staticmethod
    def _state(model):
        return [*model.variables, *model.optimizer.variables]

    def fit(self, replicas, callbacks):
        """Train from the beginning, or from a backup; returns the state at the end, and the losses."""
        model, before = self._models[replicas]
        for variable, value in zip(self._state(model), before, strict=True):
            variable.assign(value)
        given = {"batch_size": 6, "epochs": 3, "shuffle": False, "verbose": 0}
        history = model.fit(ROWS, ROWS[:, :1], callbacks=callbacks, **given).history
        return [np.asarray(v) for v in self._state(model)], history["loss"]


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("local", "fragments, overlap") else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in OPTIONS
    ],
)
def test_a_fit_resumes_on_every_number_of_replicas(tmp_path, name):
    """On the same number with the same bits; on another one, where all replicas take the same steps, with the
    same losses up to rounding."""
    backup = lambda folder: BackupAndRestore(folder, save_freq=2, asynchronous=False)  # noqa: E731
    options = OPTIONS[name]
    trained = Trained(options)
    wanted = {n: trained.fit(n, []) for n in REPLICAS}
    for before in REPLICAS:
        kept = tmp_path / str(before)
        with pytest.raises(Stop):
            trained.fit(before, [backup(kept), Fails()])
        for after in REPLICAS:
            folder = tmp_path / f"{before}-{after}"
            shutil.copytree(kept, folder)
            state, losses = trained.fit(after, [backup(folder), Fails(never=True)])
            if after == before:
                assert losses == wanted[before][1]
                for found, exact in zip(state, wanted[before][0], strict=True):
                    np.testing.assert_array_equal(found, exact)
            else:
                assert losses[0] == wanted[before][1][0]
                # What is compressed, and when is exchanged, depends on the number of replicas.
                near = 0.5 if "sync" in options else 0.05 if "cross_device_ops" in options else 1e-4
                np.testing.assert_allclose(losses, wanted[before][1], rtol=near)
