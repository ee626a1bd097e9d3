"""State in parts on replicas whose devices belong to several processes; runs in each process of a cluster.

`tests/cluster/test_contract.py` starts the processes.
"""

import functools
import math
import os

import keras
import numpy as np
import pytest

import unisono
from tests.virtual.strategies import test_compressed_grids as grids_compressed
from tests.virtual.strategies import test_replica_grid as grids
from tests.virtual.strategies import test_sharded_grid as sharded
from tests.virtual.strategies.test_replica_grid import assert_close, values
from tests.virtual.strategies.test_replica_grid_workers import shared
from tests.virtual.strategies.test_sharded_grid import INPUTS, data
from tests.virtual.strategies.test_spanning_workers import assert_equal
from unisono.callbacks import BackupAndRestore
from unisono.checkpoint import Checkpoint
from unisono.sharding._shards import Shards
from unisono.step._keras_internals import stored_value

pytestmark = pytest.mark.skipif("TF_CONFIG" not in os.environ, reason="needs a cluster")

LAYOUTS = ["sharded", "fully_sharded"]
UP_AND_DOWN = {f".*{path}": axes for path, axes in grids.UP_AND_DOWN.items()}


#: Divides over four devices of a replica; the biases of the inputs' number do not divide over replicas.
WIDTH = 140


def mlp():
    inputs = keras.Input((INPUTS,))
    h = grids.L.Dense(INPUTS, name="down")(grids.L.Dense(WIDTH, activation="relu", name="up")(inputs))
    return keras.Model(inputs, grids.L.Dense(INPUTS, name="other")(h))


compiled = functools.partial(sharded.compiled, make=mlp)
trained = functools.partial(sharded.trained, make=mlp)


def strategy(layout, layout_map=UP_AND_DOWN, processes=2, **options):
    """Each replica has all devices of two processes."""
    size = processes * int(os.environ["UNISONO_DEVICES_PER_WORKER"])
    return unisono.MultiWorkerMirroredStrategy(
        devices_per_replica=size, layout_map=layout_map, state_layout=layout, **options
    )


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Join the cluster before the first test: it sets XLA_FLAGS, for which no test must be blamed."""
    return strategy("sharded")


@pytest.fixture(scope="module")
def wanted():
    return trained(unisono.OneDeviceStrategy("cpu:0"))


def parts(variable):
    """The axis that a replica's devices share, and the shapes on this process' devices."""
    held = stored_value(variable)
    assert isinstance(held, Shards), held
    return held.layout.axis, {s.data.shape for s in held.parts.addressable_shards}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_spanning_shards_training(tmp_path, layout, wanted):
    """With a ragged last batch, and elements that do not divide; files are those of every other layout."""
    own = strategy(layout)
    replicas, size = own.num_replicas_in_sync, own.mesh.size
    model, found = trained(own)
    assert_close(found, wanted[1])
    assert_close(values(model), values(wanted[0]))
    if replicas > 1:
        piece = {(math.ceil(INPUTS * WIDTH / size / replicas),)}
        slots = {v.path.split("/")[-1]: v for v in model.optimizer.variables}
        assert parts(slots["up_kernel_momentum"]) == (1, piece)
        assert parts(slots["other_bias_momentum"]) == (None, {(math.ceil(INPUTS / replicas),)})
        if layout == "fully_sharded":
            assert parts(model.get_layer("down").kernel) == (0, piece)
    written = Checkpoint(model=model).write(shared(tmp_path, f"{layout}-checkpoint"))
    others = [strategy("fully_sharded", processes=own.num_workers), strategy(layout)]
    others.append(unisono.MultiWorkerMirroredStrategy(state_layout=layout))
    x, y = data(22)
    losses = []
    for other in others:
        again = compiled(other)
        # Keras would read weights to build the metrics of a model that was never fitted.
        again.fit(*data(8), batch_size=8, verbose=0)
        Checkpoint(model=again).restore(written)
        assert_equal(values(again), values(model))
        losses.append(again.fit(x, y, batch_size=8, verbose=0, shuffle=False).history["loss"])
    own_losses = model.fit(x, y, batch_size=8, verbose=0, shuffle=False).history["loss"]
    np.testing.assert_allclose(losses, [own_losses] * len(losses), **grids.CLOSE)
    assert losses[1] == own_losses
    model.save(shared(tmp_path, f"{layout}.keras"))
    loaded = keras.saving.load_model(shared(tmp_path, f"{layout}.keras"))
    assert_equal(values(loaded), values(model))
    fresh = compiled(strategy(layout))
    fresh.optimizer.build(fresh.trainable_variables)
    fresh.load_weights(shared(tmp_path, f"{layout}.keras"))
    assert_close([fresh.predict(x, verbose=0)], [model.predict(x, verbose=0)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_spanning_shards_resume(tmp_path, layout):
    folder = shared(tmp_path, f"{layout}-backup")
    x, y = data(22)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 4:
                raise InterruptedError

    def fit(*callbacks):
        model = compiled(strategy(layout))
        model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[*callbacks])
        return model

    whole = fit()
    with pytest.raises(InterruptedError):
        fit(BackupAndRestore(folder, save_freq=1), Stop())
    assert_equal(values(fit(BackupAndRestore(folder, save_freq=1))), values(whole))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_spanning_shards_custom_loop(layout):
    """With batches that do not divide, where replicas have unequal numbers of rows."""
    found = []
    for own in (unisono.OneDeviceStrategy("cpu:0"), strategy(layout)):
        model = compiled(own)
        x, y = data(15)

        def step(batch, model=model):
            x, y = batch
            with unisono.GradientTape() as tape:
                loss = unisono.nn.compute_average_loss(keras.ops.mean((model(x, training=True) - y) ** 2, -1))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
            return loss

        batches = own.distribute_dataset([(x[i : i + 6], y[i : i + 6]) for i in (0, 6, 12)] * 2)
        losses = [own.reduce("SUM", own.run(step, (b,)), axis=None) for b in batches]
        found.append([*map(np.asarray, losses), *values(model)])
    assert_close(found[1], found[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_spanning_shards_by_the_program(layout):
    """Workers with other seeds begin with the first one's values, and with those that all were given."""
    own = strategy(layout, "auto")
    x, y = data(22)
    fit = {"batch_size": 8, "verbose": 0, "shuffle": False}
    with own.scope():
        keras.utils.set_random_seed(own.worker_index)
        model = wide()
        model.compile("sgd", "mse")
    model.fit(x, y, **fit)
    plain = compiled(unisono.OneDeviceStrategy("cpu:0"), lambda: keras.optimizers.SGD(0.01), make=wide)
    first = [np.array(v.numpy()) for v in plain.variables]
    plain.fit(x, y, **fit)
    assert_close([np.asarray(v) for v in model.variables], [np.asarray(v) for v in plain.variables])
    again = compiled(strategy(layout, "auto"), lambda: keras.optimizers.SGD(0.01), make=wide)
    # In parts from where they are read, along any axis, and then as the program says.
    again.set_weights([np.roll(v, 1) for v in first])
    again.set_weights(first)
    again.fit(x, y, **fit)
    assert_close(values(again), values(plain))
    if layout == "fully_sharded" and own.num_replicas_in_sync > 1:
        assert [parts(again.layers[i].kernel)[0] for i in (1, 2)] == [1, 0]


def wide():
    inputs = keras.Input((INPUTS,))
    return keras.Model(inputs, grids.L.Dense(INPUTS)(grids.L.Dense(1024, activation="relu")(inputs)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_spanning_shards_of_an_optimizer_of_whole_weights(layout):
    def lamb():
        return keras.optimizers.Lamb(0.01)

    model, found = trained(strategy(layout), rows=14, optimizer=lamb)
    plain, expected = trained(unisono.OneDeviceStrategy("cpu:0"), rows=14, optimizer=lamb)
    assert_close(found, expected)
    assert_close(values(model), values(plain))


def test_spanning_shards_of_a_transformer():
    """With attention that is cut by heads."""
    own = strategy("fully_sharded", grids.MEGATRON)
    _, found = grids.trained(own, rows=11)
    _, expected = grids.trained(unisono.OneDeviceStrategy("cpu:0"), rows=11)
    assert_close(found, expected)


# All kinds with all layouts are compared where replicas belong to one process: test_compressed_grids.py.
@pytest.mark.parametrize(
    ("layout", "kind"),
    [("mirrored", "power_sgd"), ("mirrored", "int8"), ("sharded", "top_k"), ("fully_sharded", "int8")],
)
def test_spanning_compression(layout, kind):
    """Nothing of a gradient is lost."""
    own = strategy(layout, grids_compressed.CUT, cross_device_ops=grids_compressed.OPS[kind]())
    if own.num_replicas_in_sync > 1:
        grids_compressed.leaves_nothing_out(own)


@pytest.mark.parametrize("layout", ["mirrored", *LAYOUTS])
def test_spanning_compression_learns(tmp_path, layout):
    """Within the tolerance of replicas of one device; errors go to other numbers of replicas and devices."""
    ops = grids_compressed.OPS
    exact = grids_compressed.fitted(grids_compressed.compiled(unisono.OneDeviceStrategy("cpu:0")), 4)
    for kind in ("int8", "top_k"):
        own = strategy(layout, grids_compressed.CUT, cross_device_ops=ops[kind]())
        model = grids_compressed.compiled(own)
        history = grids_compressed.fitted(model, 4)
        tolerance = grids_compressed.TOLERANCES[kind] if own.num_replicas_in_sync > 1 else 2e-5
        assert history["loss"][-1] == pytest.approx(exact["loss"][-1], rel=tolerance)
    left = grids_compressed.errors(model.optimizer)
    assert len(left) == 2
    others = [
        strategy("mirrored", grids_compressed.CUT, own.num_workers, cross_device_ops=ops["top_k"]()),
        unisono.MultiWorkerMirroredStrategy(state_layout=layout, cross_device_ops=ops["top_k"]()),
        strategy(layout, "auto", cross_device_ops=ops["top_k"]()),
    ]
    for number, other in enumerate(others):
        written = Checkpoint(model=model).write(shared(tmp_path, f"{layout}-errors-{number}"))
        model = grids_compressed.compiled(other)
        with other.scope():
            model.optimizer.build(model.trainable_variables)
        Checkpoint(model=model).restore(written)
        for found, before in zip(grids_compressed.errors(model.optimizer), left, strict=True):
            np.testing.assert_allclose(found, before, rtol=0, atol=1e-7)
    # What the only replica of a checkpoint's has left is applied by its first step.
    grids_compressed.fitted(model, rows=64)


def test_spanning_compression_of_small_gradients_is_exact(wanted):
    ops = unisono.CompressedAllReduce("int8", exact_below=10**9)
    _, found = trained(strategy("mirrored", cross_device_ops=ops))
    assert_close(found, wanted[1])
