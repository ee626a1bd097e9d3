"""Replicas of several devices on several workers; runs in each process of a cluster.

`tests/cluster/test_contract.py` starts the processes.
"""

import os
import tracemalloc

import keras
import numpy as np
import pytest

import unisono
from tests.virtual.strategies import test_replica_grid as grids
from tests.virtual.strategies.test_replica_grid import assert_close, compiled, cut_axis, data, trained, values
from unisono.callbacks import BackupAndRestore
from unisono.checkpoint import Checkpoint
from unisono.cluster._jax_process_group import HostCollectives
from unisono.step._keras_internals import stored_value

L = keras.layers

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


def test_grid_loads_weights_that_no_host_holds_whole(tmp_path, monkeypatch):
    """Workers that have read a file compare digests of parts: nothing is sent, one part at a time is read."""
    own = strategy()
    with own.scope():
        layers = [L.Dense(512, name=name) for i in range(3) for name in (f"{i}_up", f"{i}_down")]
        model = keras.Sequential([keras.Input((512,)), *layers])
        model.compile("sgd", "mse")
    file = shared(tmp_path, "large.weights.h5")
    model.save_weights(file)
    keras.utils.set_random_seed(1 + own.worker_index)
    for layer in layers:
        layer.kernel.assign(keras.random.normal(layer.kernel.shape))
    model.load_weights(file)
    assert cut_axis(layers[0].kernel) == 1
    sent, peaks = [], []
    send, equal = HostCollectives._run, type(own.process_group).equal_arrays

    def counted(self, program, data, size):
        sent.append(size)
        return send(self, program, data, size)

    def measured(self, *args):
        tracemalloc.start()
        try:
            return equal(self, *args)
        finally:
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()

    monkeypatch.setattr(HostCollectives, "_run", counted)
    monkeypatch.setattr(type(own.process_group), "equal_arrays", measured)
    x = np.ones((8, 512), "float32")
    model.fit(x, x, batch_size=8, verbose=0)
    largest = layers[0].kernel.value.nbytes
    assert sum(sent) < 20_000
    assert max(peaks) < largest


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
