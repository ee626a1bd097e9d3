"""Replicas of several devices on several workers; runs in each process of a cluster.

`tests/cluster/test_contract.py` starts the processes.
"""

import os

import keras
import numpy as np
import pytest

import unisono
from tests.virtual.strategies import test_replica_grid as grids
from tests.virtual.strategies.test_replica_grid import assert_close, compiled, cut_axis, data, trained, values
from unisono.callbacks import BackupAndRestore
from unisono.checkpoint import Checkpoint
from unisono.step._keras_internals import stored_value

pytestmark = pytest.mark.skipif("TF_CONFIG" not in os.environ, reason="needs a cluster")


def strategy(size=2, layout_map=grids.MEGATRON):
    return unisono.MultiWorkerMirroredStrategy(devices_per_replica=size, layout_map=layout_map)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Join the cluster before the first test: it sets XLA_FLAGS, for which no test must be blamed."""
    return strategy()


def shared(tmp_path, name):
    """A path that is the same for all workers."""
    return str(tmp_path.parent.parent / name)


def test_grid_training(tmp_path):
    model, found = trained(strategy())
    wanted_model, wanted = trained(unisono.OneDeviceStrategy("cpu:0"))
    assert_close(found, wanted)
    assert_close(values(model), values(wanted_model))
    kernel = stored_value(model.get_layer("layer_0_up").kernel)
    # Of this process' first replica, in parts.
    assert {s.data.shape for s in kernel.addressable_shards} == {(grids.WIDTH, 32)}
    written = Checkpoint(model=model).write(shared(tmp_path, "checkpoint"))
    again = compiled(strategy(4))
    again.optimizer.build(again.trainable_variables)
    Checkpoint(model=again).restore(written)
    for ours, theirs in zip(values(again), values(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    x, y = data(22)
    losses = [m.fit(x, y, batch_size=8, verbose=0, shuffle=False).history["loss"] for m in (model, again)]
    np.testing.assert_allclose(*losses, **grids.CLOSE)
    model.save(shared(tmp_path, "model.keras"))
    loaded = keras.saving.load_model(shared(tmp_path, "model.keras"))
    for ours, theirs in zip(values(loaded), values(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_grid_first_values():
    """Workers with other seeds begin with the first one's values, in `fit` and in a loop."""
    own = strategy()
    with own.scope():
        keras.utils.set_random_seed(own.worker_index)
        model = grids.transformer()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        with keras.name_scope("up"):
            kernel = keras.Variable(keras.initializers.GlorotUniform(), shape=(4, 8), name="kernel")
    x, y = data(8)
    model.fit(x, y, verbose=0)
    with unisono.OneDeviceStrategy("cpu:0").scope():
        keras.utils.set_random_seed(0)
        wanted = grids.transformer()
        wanted.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    wanted.fit(x, y, verbose=0)
    assert_close([np.asarray(v) for v in model.variables], [np.asarray(v) for v in wanted.variables])
    sums = own.gather(own.run(lambda: kernel.value.sum()[None]), 0)
    assert len(set(np.asarray(sums).tolist())) == 1


def test_grid_resumes(tmp_path):
    folder = shared(tmp_path, "backup")
    x, y = data(24)

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise InterruptedError

    whole = compiled(strategy())
    whole.fit(x, y, batch_size=8, epochs=3, verbose=0)
    model = compiled(strategy())
    with pytest.raises(InterruptedError):
        model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[BackupAndRestore(folder), Stop()])
    again = compiled(strategy())
    again.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[BackupAndRestore(folder)])
    for ours, theirs in zip(values(again), values(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert cut_axis(again.get_layer("layer_0_up").kernel) == 1


def test_grid_devices_must_be_of_one_process():
    with pytest.raises(unisono.InvalidArgumentError, match=r"must belong to one process.*replica 0"):
        strategy(8)
