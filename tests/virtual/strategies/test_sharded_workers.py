"""Optimizer state and weights in parts on the replicas of several workers; runs in each process of a cluster.

`tests/cluster/test_contract.py` starts the processes.
"""

import os
import signal
import time
import weakref

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.failing_files import failing_calls
from tests.virtual.strategies import test_fully_sharded_state as fully_sharded
from tests.virtual.strategies.test_sharded_state import (
    CLOSE,
    assert_close,
    bytes_on,
    compiled,
    data,
    in_shards,
    values,
)
from unisono.callbacks import BackupAndRestore
from unisono.checkpoint import Checkpoint, _safetensors
from unisono.checkpoint._unread_arrays import SentArray
from unisono.sharding._shards import ShardedVariableLayout
from unisono.step._keras_internals import stored_value
from unisono.step._value_handle import DeferredValue

pytestmark = pytest.mark.skipif("TF_CONFIG" not in os.environ, reason="needs a cluster")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Join the cluster before the first test: it sets XLA_FLAGS, for which no test must be blamed."""
    unisono.MultiWorkerMirroredStrategy()


def optimizer():
    return keras.optimizers.Adam(0.01, global_clipnorm=0.5)


def fitted(layout, callbacks=()):
    strategy = unisono.MultiWorkerMirroredStrategy(state_layout=layout)
    model = compiled(strategy, optimizer())
    x, y = data(37)
    model.fit(x, y, batch_size=12, epochs=2, verbose=0, shuffle=False, callbacks=[*callbacks])
    return strategy, model


def test_spread_optimizer_state(tmp_path):
    _, mirrored = fitted("mirrored")
    wanted = values(mirrored)
    path = str(tmp_path.parent.parent / "sharded")  # one folder for all workers
    files = {name: f"{path}-{name}" for name in ("epoch.keras", "end.keras", "checkpoint", "mirrored")}
    strategy, model = fitted("sharded", [keras.callbacks.ModelCheckpoint(files["epoch.keras"])])
    assert len(in_shards(model.optimizer)) == 8
    sizes = [int(np.prod(v.shape)) for v in model.trainable_variables]
    replicas = strategy.num_replicas_in_sync
    parts = 2 * 4 * sum(-(-size // replicas) for size in sizes)
    for device in strategy.worker_devices:
        # A worker's whole numbers, the iterations and the learning rate, lie on its first device.
        assert parts <= bytes_on(device, model.optimizer) <= parts + 8
    assert_close(values(model), wanted)
    model.save(files["end.keras"])
    for name in ("epoch.keras", "end.keras"):
        loaded = keras.saving.load_model(files[name])
        assert_close([np.asarray(v) for v in loaded.optimizer.variables], wanted[len(model.variables) :])
    written = Checkpoint(model=model).write(files["checkpoint"])
    Checkpoint(model=mirrored).restore(written)
    for ours, theirs in zip(values(mirrored), values(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    again = Checkpoint(model=mirrored).write(files["mirrored"])
    Checkpoint(model=model).restore(again)
    x, y = data(37)
    losses = [m.fit(x, y, batch_size=12, verbose=0, shuffle=False).history["loss"] for m in (model, mirrored)]
    np.testing.assert_allclose(*losses, **CLOSE)
    if strategy.is_chief:
        # As a program does that saves there alone.
        assert_close(values(model), values(mirrored))


def test_spread_custom_loop():
    found = []
    for layout in ("mirrored", "sharded"):
        strategy = unisono.MultiWorkerMirroredStrategy(state_layout=layout)
        with strategy.scope():
            keras.utils.set_random_seed(0)
            weights = [keras.Variable(keras.random.normal(s)) for s in ((7, 5), (5,), ())]
            own = optimizer()

        def step(x, weights=weights, own=own):
            own.apply([w * keras.ops.mean(x) for w in weights], weights)

        for batch in strategy.distribute_dataset([np.arange(n, dtype="float32") for n in (12, 12, 7)]):
            strategy.run(step, (batch,))
        found.append([np.asarray(v) for v in [*weights, *own.variables]])
    assert in_shards(own)
    assert_close(found[1], found[0])


def test_spread_first_values():
    """Workers with other seeds begin with parts of the first one's values, which none makes before."""
    x, _ = fully_sharded.data(16)
    models = []
    for layout in ("mirrored", "fully_sharded"):
        strategy = unisono.MultiWorkerMirroredStrategy(state_layout=layout)
        with strategy.scope():
            keras.utils.set_random_seed(strategy.process_group.index)
            size = x.shape[1]
            model = keras.Sequential([keras.Input((size,)), keras.layers.Dense(size), keras.layers.Dense(3)])
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        first = stored_value(model.weights[0])
        assert isinstance(first, DeferredValue) == (layout == "fully_sharded")
        model.fit(x, np.ones((16, 3)), batch_size=16, verbose=0)
        models.append(model)
    mirrored, model = models
    assert len(fully_sharded.in_parts(model.weights)) == 1
    # No callback reads weights where an epoch ends: none is gathered.
    assert stored_value(model.weights[0]).needs_all
    assert_close(values(model), values(mirrored))
    # What all workers assign is cut at once, and is what they begin with.
    model.set_weights([w + 1 for w in mirrored.get_weights()])
    mirrored.set_weights([w + 1 for w in mirrored.get_weights()])
    assert len(fully_sharded.in_parts(model.weights)) == 1
    losses = [m.fit(x, np.ones((16, 3)), batch_size=16, verbose=0).history["loss"] for m in models]
    np.testing.assert_allclose(*losses, **CLOSE)


def test_spread_weights(tmp_path):
    """In `fit`, a loop, a callback that saves, and files between the layouts."""
    x, y = fully_sharded.data(48)
    files = {name: f"{tmp_path.parent.parent}/weights-{name}" for name in ("epoch.keras", "end.keras", "own")}
    models = []
    for layout in ("mirrored", "fully_sharded"):
        strategy = unisono.MultiWorkerMirroredStrategy(state_layout=layout)
        model = fully_sharded.compiled(strategy)
        saves = [keras.callbacks.ModelCheckpoint(files["epoch.keras"])] if models else []
        model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False, callbacks=saves)

        def step(batch, model=model):
            x, y = batch
            with unisono.GradientTape() as tape:
                loss = model.compute_loss(y=y, y_pred=model(x, training=True))
            model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        (batch,) = strategy.distribute_dataset([(x[:16], y[:16])])
        strategy.run(step, (batch,))
        models.append(model)
    mirrored, model = models
    assert len(fully_sharded.in_parts(model.weights)) == 2
    for weight in fully_sharded.in_parts(model.weights):
        held = stored_value(weight).parts.addressable_shards
        assert sum(s.data.size for s in held) <= -(-weight.value.size // strategy.process_group.size) + 2
    assert_close(values(model), values(mirrored))
    np.testing.assert_allclose(*[m.evaluate(x, y, batch_size=16, verbose=0) for m in models], **CLOSE)
    model.save(files["end.keras"])
    loaded = keras.saving.load_model(files["end.keras"])
    assert_close(values(loaded), values(model))
    assert keras.saving.load_model(files["epoch.keras"]).count_params() == model.count_params()
    Checkpoint(model=mirrored).restore(Checkpoint(model=model).write(files["own"]))
    losses = [m.fit(x, y, batch_size=16, verbose=0, shuffle=False).history["loss"] for m in models]
    np.testing.assert_allclose(*losses, **CLOSE)


class Wholes:
    """Counts the bytes of whole values of variables in parts that are there at the same time."""

    def __init__(self):
        self.now = self.most = self.count = 0

    def add(self, array):
        self.count += 1
        self.now += array.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(array, self._remove, array.nbytes)
        return array

    def _remove(self, size):
        self.now -= size


@pytest.fixture
def wholes(monkeypatch):
    """What this worker gathers to save, and what it reads or receives to restore."""
    counted, gathered, read = Wholes(), ShardedVariableLayout.gathered, SentArray.__array__
    monkeypatch.setattr(
        ShardedVariableLayout, "gathered", lambda self, parts: counted.add(gathered(self, parts))
    )
    monkeypatch.setattr(
        SentArray, "__array__", lambda self, *args, **kw: counted.add(read(self, *args, **kw))
    )
    monkeypatch.setattr(_safetensors, "LARGE", 4096)
    return counted


def test_spread_backup(tmp_path, wholes):
    """Of a state in parts no worker has more than two whole variables, whether it is saved or restored."""
    x, y = fully_sharded.data(48)
    folder = tmp_path.parent.parent / "backup"

    def fitted(epochs, save_freq=None):
        strategy = unisono.MultiWorkerMirroredStrategy(state_layout="fully_sharded")
        with strategy.scope():
            keras.utils.set_random_seed(0)
            layers = [keras.layers.Dense(size, "tanh") for size in (35, 35)]
            model = keras.Sequential([keras.Input(x.shape[1:]), *layers, keras.layers.Dense(3)])
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        saves = (
            [] if save_freq is None else [BackupAndRestore(folder, save_freq, delete_checkpoint=epochs == 3)]
        )
        wholes.count = wholes.most = 0
        model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, shuffle=False, callbacks=saves)
        return model

    wanted = fitted(3)
    assert not wholes.count
    spread = [*fully_sharded.in_parts(wanted.weights), *fully_sharded.in_parts(wanted.optimizer.variables)]
    sizes = [v.nbytes for v in map(stored_value, spread)]
    most = 2 * max(sizes)
    assert most < sum(sizes)
    # The first worker alone measures, and all save when it wants to; the end of training is kept.
    fitted(1, "auto")
    assert wholes.count in range(len(spread), 9 * len(spread), len(spread))
    assert wholes.most <= most
    # Restored, and saved at the end of an epoch.
    fitted(2, "epoch")
    assert wholes.count > len(spread)
    assert wholes.most <= most
    model = fitted(3, "epoch")
    assert wholes.most <= most
    for ours, theirs in zip(values(model), values(wanted), strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Fails(keras.callbacks.Callback):
    """Calls a function when training begins, and another one when it is saved."""

    def __init__(self, begin, save=dict):
        super().__init__()
        self._begin, self._save = begin, save

    def on_train_begin(self, logs=None):
        self._begin()

    def get_state(self):
        return self._save()

    def set_state(self, state):
        """Nothing was saved."""


def test_spread_backups_that_fail(tmp_path):
    """The others do not wait for a first worker that cannot save, and end with one that cannot begin."""
    folder = tmp_path.parent.parent / "failing"
    is_chief = unisono.MultiWorkerMirroredStrategy().process_group.is_chief
    backup = lambda: BackupAndRestore(folder, save_freq=2, delete_checkpoint=False)  # noqa: E731
    wanted = values(fitted("sharded")[1])

    def forget():
        if is_chief:
            raise LookupError("no such state")
        return {}

    with failing_calls(folder) as calls:
        begin = lambda: is_chief and calls.begin(1, once=False)  # noqa: E731
        for fails in (Fails(begin), Fails(dict, forget)):
            _, model = fitted("sharded", [backup(), fails])
            calls.end()
            for ours, theirs in zip(values(model), wanted, strict=True):
                np.testing.assert_array_equal(ours, theirs)
        begin()
        error = unisono.CheckpointError if is_chief else unisono.ClusterError
        with pytest.raises(error, match="the token has expired"):
            fitted("sharded", [backup()])


def test_spread_local_phase(tmp_path):
    """Each worker has the rows of its own replicas, and all of them are in the backup."""
    folder, replicas = tmp_path.parent.parent / "local", 4 * jax.device_count()
    sync = unisono.LocalUpdates(5, lambda: keras.optimizers.SGD(0.7, momentum=0.9), fragments=2)
    x, y = data(9 * replicas)

    def trained(*callbacks):
        strategy = unisono.MultiWorkerMirroredStrategy(sync=sync)
        model = compiled(strategy, keras.optimizers.Adam(0.01))
        model.fit(x, y, batch_size=replicas, epochs=2, verbose=0, shuffle=False, callbacks=[*callbacks])
        return model

    wanted = values(trained())
    backup = lambda: BackupAndRestore(folder, save_before_preemption=True)  # noqa: E731
    with pytest.raises(SystemExit):
        trained(backup(), keras.callbacks.LambdaCallback(on_train_batch_end=_preempt))
    for ours, theirs in zip(values(trained(backup())), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Slow(keras.layers.Layer):
    """Gives what it gets; on the last replica of each worker, later."""

    def late(self, number):
        time.sleep(0.05 if int(number) % jax.local_device_count() else 0)
        return np.float32(0)

    def call(self, x):
        if (context := unisono.get_replica_context()) is None:
            return x
        number = context.replica_id_in_sync_group
        zero = jax.pure_callback(self.late, jax.ShapeDtypeStruct((), "float32"), number)
        return x + jax.lax.stop_gradient(zero)


def test_spread_batches_stay_until_each_replica_has_read_them():
    """No replica waits for another in a step of `LocalUpdates`, and the host waits for all of them."""
    replicas = 4 * jax.device_count()
    x, y = data(16 * replicas)

    def trained(*layers):
        keras.utils.set_random_seed(3)
        strategy = unisono.MultiWorkerMirroredStrategy(sync=unisono.LocalUpdates(16))
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input(x.shape[1:]), *layers, keras.layers.Dense(3)])
            model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(True))
        model.fit(x, y, batch_size=replicas, verbose=0, shuffle=False)
        return values(model)

    for ours, theirs in zip(trained(Slow()), trained(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def _preempt(batch, logs=None):
    if batch == 2:
        signal.raise_signal(signal.SIGTERM)
