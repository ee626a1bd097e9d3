"""`LocalUpdates` with replicas of several devices on several workers; runs in each process of a cluster.

`tests/cluster/test_contract.py` starts the processes.
"""

import os
import signal

import keras
import numpy as np
import pytest

import unisono
from tests.support import devices
from tests.virtual.strategies.test_local_updates_of_grids import (
    CUT,
    assert_close,
    compiled,
    data,
    outer,
    values,
)
from unisono.callbacks import BackupAndRestore
from unisono.checkpoint import Checkpoint
from unisono.model_parallel._spanning_layout import SpannedParts
from unisono.step._keras_internals import stored_value

pytestmark = pytest.mark.skipif("TF_CONFIG" not in os.environ, reason="needs a cluster")

SYNCS = {
    "fragments": unisono.LocalUpdates(5, outer, fragments=2),
    "overlap": unisono.LocalUpdates(5, outer, fragments=2, overlap=2),
}


def strategy(size=2, sync="overlap"):
    options = {"devices_per_replica": size, "layout_map": CUT} if size > 1 else {}
    return unisono.MultiWorkerMirroredStrategy(sync=SYNCS[sync], **options)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Join the cluster before the first test, with a device for exchanges: it sets XLA_FLAGS."""
    return strategy()


def shared(tmp_path, name):
    """A path that is the same for all workers."""
    return str(tmp_path.parent.parent / name)


def sgd():
    """Not Adam, which enlarges the roundings of small gradients."""
    return keras.optimizers.SGD(0.05, momentum=0.9)


def fitted(model, replicas, steps=9, epochs=2, callbacks=()):
    """Train in batches of four rows a replica, of which the last one does not divide."""
    # Two rows, normalized, are little more than the sign of their difference, which may be a rounding.
    x, y = data(4 * replicas * steps - 5)
    options = {"batch_size": 4 * replicas, "epochs": epochs, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, callbacks=[*callbacks], **options).history
    return [*map(np.asarray, history["loss"] + history["accuracy"]), model.predict(x, verbose=0)]


@pytest.mark.parametrize("sync", SYNCS)
def test_local_grid_training(tmp_path, sync):
    own = strategy(sync=sync)
    replicas = own.num_replicas_in_sync
    model = compiled(own, optimizer=sgd)
    found = fitted(model, replicas)
    alone = unisono.MirroredStrategy(devices(replicas), sync=SYNCS[sync])
    wanted_model = compiled(alone, optimizer=sgd)
    # Of 18 steps that normalize over four rows; in float64 they differ by at most 1e-15.
    assert_close(found, fitted(wanted_model, replicas), atol=1e-4)
    assert_close(values(model), values(wanted_model))
    kernel = stored_value(model.get_layer("up").kernel)
    # Of this process' first replica, in parts.
    assert {s.data.shape for s in kernel.addressable_shards} == {(6, 8)}
    slots = {v.path.split("/")[-1]: stored_value(v) for v in model.optimizer.variables}
    slot = next(held for name, held in slots.items() if "up_kernel_momentum" in name)
    assert isinstance(slot, SpannedParts)
    assert {s.data.shape for s in slot.array.addressable_shards} == {(1, 6, 8)}
    outers = [x for name, x in slots.items() if name.startswith("outer_") and x.shape == (6, 16)]
    assert {s.data.shape for x in outers for s in x.addressable_shards} == {(6, 8)}
    written = Checkpoint(model=model).write(shared(tmp_path, f"{sync}-checkpoint"))
    for size in (1, 2):
        again = compiled(strategy(size, sync), optimizer=sgd)
        # Keras would read weights to build the metrics of a model that was never fitted.
        fitted(again, replicas, 1, 1)
        Checkpoint(model=again).restore(written)
        for ours, theirs in zip(again.variables, model.variables, strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert_close(fitted(again, replicas, 1, 1), fitted(model, replicas, 1, 1))
    for ours, theirs in zip(values(again), values(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    model.save(shared(tmp_path, f"{sync}.keras"))
    loaded = keras.saving.load_model(shared(tmp_path, f"{sync}.keras"))
    for ours, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    saved = {v.path.split("/")[-1]: np.asarray(v) for v in loaded.optimizer.variables}
    name = next(name for name in saved if "up_kernel_momentum" in name)
    # The first replica's row.
    wanted = next(v for v in model.optimizer.variables if "up_kernel_momentum" in v.path)
    np.testing.assert_array_equal(saved[name], np.asarray(wanted)[0])


def _preempt(batch, logs=None):
    if batch == 2:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("sync", SYNCS)
def test_local_grid_resumes_within_a_phase(tmp_path, sync):
    """With the same bits; with replicas of other devices from what the replicas had learned."""

    def trained(size, *callbacks):
        model = compiled(strategy(size, sync))
        losses = fitted(model, strategy().num_replicas_in_sync, callbacks=callbacks)[:2]
        return losses, values(model)

    wanted = trained(2)
    for name, size in (("same", 2), ("other", 1)):
        folder = shared(tmp_path, f"{sync}-{name}")
        backup = lambda folder=folder: BackupAndRestore(folder, save_before_preemption=True)  # noqa: E731
        with pytest.raises(SystemExit):
            trained(2, backup(), keras.callbacks.LambdaCallback(on_train_batch_end=_preempt))
        losses, found = trained(size, backup())
        if name == "same":
            for ours, theirs in zip([*losses, *found], [*wanted[0], *wanted[1]], strict=True):
                np.testing.assert_array_equal(ours, theirs)
        else:
            np.testing.assert_allclose(losses, wanted[0], rtol=0.2)
