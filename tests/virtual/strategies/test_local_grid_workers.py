"""`LocalUpdates` with replicas of several devices on several workers; runs in each process of a cluster.

`tests/cluster/test_contract.py` starts the processes.
"""

import os
import shutil
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


#: How many devices a replica has: of one process, or all of two.
SIZES = {"inside": 2, "across": 2 * int(os.environ.get("UNISONO_DEVICES_PER_WORKER", "1"))}


def strategy(size=2, sync="overlap", layout_map=CUT):
    options = {"devices_per_replica": size, "layout_map": layout_map} if size > 1 else {}
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


def slow_sgd():
    """For many weights."""
    return keras.optimizers.SGD(0.001, momentum=0.9)


def fitted(model, replicas, steps=9, epochs=2, callbacks=()):
    """Train in batches of four rows a replica, of which the last one does not divide."""
    # Two rows, normalized, are little more than the sign of their difference, which may be a rounding.
    x, y = data(4 * replicas * steps - 5)
    options = {"batch_size": 4 * replicas, "epochs": epochs, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, callbacks=[*callbacks], **options).history
    return [*map(np.asarray, history["loss"] + history["accuracy"]), model.predict(x, verbose=0)]


def shapes_here(held):
    """The shapes of a value's parts on this process' devices."""
    return {s.data.shape for s in getattr(held, "array", held).addressable_shards}


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("place", SIZES)
def test_local_grid_training(tmp_path, place, sync):
    size = SIZES[place]
    own = strategy(size, sync)
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
    assert shapes_here(kernel) == {(6, 16 // size)}
    assert isinstance(kernel, SpannedParts) == (place == "across")
    slots = {v.path.split("/")[-1]: stored_value(v) for v in model.optimizer.variables}
    slot = next(held for name, held in slots.items() if "up_kernel_momentum" in name)
    assert isinstance(slot, SpannedParts)
    assert shapes_here(slot) == {(1, 6, 16 // size) if replicas > 1 else (6, 16 // size)}
    outers = [x for name, x in slots.items() if name.startswith("outer_") and x.shape == (6, 16)]
    assert set().union(*map(shapes_here, outers)) == {(6, 16 // size)}
    written = Checkpoint(model=model).write(shared(tmp_path, f"{place}-{sync}-checkpoint"))
    for other in {"inside": (1, 2), "across": (size,)}[place]:
        again = compiled(strategy(other, sync), optimizer=sgd)
        # Keras would read weights to build the metrics of a model that was never fitted.
        fitted(again, replicas, 2, 1)
        Checkpoint(model=again).restore(written)
        for ours, theirs in zip(again.variables, model.variables, strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert_close(fitted(again, replicas, 2, 1), fitted(model, replicas, 2, 1))
    for ours, theirs in zip(values(again), values(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    model.save(shared(tmp_path, f"{place}-{sync}.keras"))
    loaded = keras.saving.load_model(shared(tmp_path, f"{place}-{sync}.keras"))
    for ours, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    saved = {v.path.split("/")[-1]: np.asarray(v) for v in loaded.optimizer.variables}
    name = next(name for name in saved if "up_kernel_momentum" in name)
    # The first replica's row.
    wanted = np.asarray(next(v for v in model.optimizer.variables if "up_kernel_momentum" in v.path))
    np.testing.assert_array_equal(saved[name], wanted[0] if replicas > 1 else wanted)


def _preempt(batch, logs=None):
    if batch == 2:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("place", SIZES)
def test_local_grid_resumes_within_a_phase(tmp_path, place, sync):
    """With the same bits; with replicas of other devices from what the replicas had learned.

    Across processes also in parts that the first batch decides, after the rows were read.
    """
    own = SIZES[place]
    replicas = strategy(own).num_replicas_in_sync

    def trained(strategy, *callbacks):
        model = compiled(strategy, **({} if place == "inside" else {"wide": 1024, "optimizer": slow_sgd}))
        losses = fitted(model, replicas, callbacks=callbacks)[:2]
        if place == "across" and strategy.mesh.devices_per_replica == own:
            assert shapes_here(stored_value(model.get_layer("up").kernel)) == {(6, 1024 // own)}
        return [*losses, *values(model)]

    def on(size):
        return strategy(size, sync, CUT if place == "inside" else "auto")

    def preempted(size, name):
        folder = shared(tmp_path, f"{place}-{sync}-{name}")
        preempt = keras.callbacks.LambdaCallback(on_train_batch_end=_preempt)
        with pytest.raises(SystemExit):
            trained(on(size), BackupAndRestore(folder, save_before_preemption=True), preempt)
        # The first worker writes it.
        on(size).process_group.gather(b"")
        return folder

    wanted = trained(on(own))
    found = trained(on(own), BackupAndRestore(preempted(own, "same")))
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # From across processes to others: tests/cluster/test_local_phase.py.
    folder, other = preempted(2, "other"), 1 if place == "inside" else own
    copied = shutil.copytree(folder, tmp_path / "copied")
    found = trained(on(other), BackupAndRestore(folder))
    if place == "inside":
        np.testing.assert_allclose(found[:2], wanted[:2], rtol=0.2)
    else:
        # As many replicas of one device end the phase of the same backup.
        alone = unisono.MirroredStrategy(devices(replicas), sync=SYNCS[sync])
        assert_close(found, trained(alone, BackupAndRestore(copied)), atol=1e-4)
