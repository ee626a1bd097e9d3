"""State in parts on replicas of several devices, on several workers; runs in each process of a cluster.

`tests/cluster/test_contract.py` starts the processes.
"""

import os

import keras
import numpy as np
import pytest

import unisono
from tests.virtual.strategies import test_replica_grid as grids
from tests.virtual.strategies.test_replica_grid import assert_close, compiled, data, trained
from unisono.callbacks import BackupAndRestore
from unisono.checkpoint import Checkpoint
from unisono.sharding._shards import Shards
from unisono.step._keras_internals import stored_value

pytestmark = pytest.mark.skipif("TF_CONFIG" not in os.environ, reason="needs a cluster")


def strategy(layout="fully_sharded", size=2):
    return unisono.MultiWorkerMirroredStrategy(
        devices_per_replica=size, layout_map=grids.MEGATRON, state_layout=layout
    )


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Join the cluster before the first test: it sets XLA_FLAGS, for which no test must be blamed."""
    return strategy()


def adam():
    return keras.optimizers.Adam(0.01, global_clipnorm=0.5)


def shared(tmp_path, name):
    """A path that is the same for all workers."""
    return str(tmp_path.parent.parent / name)


def values(model):
    """All workers read them together."""
    return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]


def test_sharded_grid_training_and_files(tmp_path):
    own = strategy()
    model, found = trained(own, optimizer=adam)
    wanted_model, wanted = trained(unisono.OneDeviceStrategy("cpu:0"), optimizer=adam)
    assert_close(found, wanted)
    assert_close(values(model), values(wanted_model))
    held = stored_value(model.get_layer("layer_0_up").kernel)
    assert isinstance(held, Shards)
    assert held.layout.axis == 1
    # Of 16 x 64 elements a device of two has a half, of which each replica keeps its part.
    count = own.num_replicas_in_sync
    assert {s.data.shape for s in held.parts.addressable_shards} == {(16 * 32 // count,)}
    written = Checkpoint(model=model).write(shared(tmp_path, "checkpoint"))
    for other in (strategy("sharded", 4), strategy()):
        again = compiled(other, optimizer=adam)
        # Keras would read weights to build the metrics of a model that was never fitted.
        again.fit(*data(8), batch_size=8, verbose=0)
        Checkpoint(model=again).restore(written)
        for ours, theirs in zip(values(again), values(model), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    x, y = data(22)
    losses = [m.fit(x, y, batch_size=8, verbose=0, shuffle=False).history["loss"] for m in (model, again)]
    np.testing.assert_array_equal(*losses)
    model.save(shared(tmp_path, "model.keras"))
    loaded = keras.saving.load_model(shared(tmp_path, "model.keras"))
    for ours, theirs in zip(values(loaded), values(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_sharded_grid_resumes(tmp_path):
    folder = shared(tmp_path, "backup")
    x, y = data(24)

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise InterruptedError

    def fit(*callbacks):
        model = compiled(strategy(), optimizer=adam)
        model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[*callbacks])
        return model

    whole = fit()
    with pytest.raises(InterruptedError):
        fit(BackupAndRestore(folder), Stop())
    again = fit(BackupAndRestore(folder))
    for ours, theirs in zip(values(again), values(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)
