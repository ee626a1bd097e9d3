"""Replicas whose devices belong to several processes; runs in each process of a cluster.

`tests/cluster/test_contract.py` starts the processes.
"""

import os

import keras
import numpy as np
import pytest

import unisono
from tests.virtual.strategies import test_replica_grid as grids
from tests.virtual.strategies.test_replica_grid import assert_close, compiled, data, trained, values
from tests.virtual.strategies.test_replica_grid_workers import shared
from unisono import InputContext
from unisono.callbacks import BackupAndRestore
from unisono.checkpoint import Checkpoint
from unisono.data import Dataset, Options
from unisono.data.experimental import AutoShardPolicy
from unisono.step._keras_internals import stored_value

pytestmark = pytest.mark.skipif("TF_CONFIG" not in os.environ, reason="needs a cluster")


def strategy(layout_map=grids.MEGATRON, **options):
    """Each replica has all devices of two processes."""
    size = 2 * int(os.environ["UNISONO_DEVICES_PER_WORKER"])
    return unisono.MultiWorkerMirroredStrategy(devices_per_replica=size, layout_map=layout_map, **options)


def shapes_here(variable):
    """The shapes of a variable's parts on this process' devices."""
    return {s.data.shape for s in stored_value(variable).array.addressable_shards}


def assert_equal(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Join the cluster before the first test: it sets XLA_FLAGS, for which no test must be blamed."""
    return strategy()


def test_spanning_thin():
    """One replica on two processes, in a short training."""
    found = []
    x = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")
    rules = {f".*{path}": axes for path, axes in grids.UP_AND_DOWN.items()}
    for own in (unisono.OneDeviceStrategy("cpu:0"), strategy(rules)):
        keras.utils.set_random_seed(0)
        with own.scope():
            layers = [grids.L.Dense(8, activation="relu", name="up"), grids.L.Dense(4, name="down")]
            model = keras.Sequential([keras.Input((4,)), *layers])
            model.compile(keras.optimizers.SGD(0.1, 0.9), "mse")
        losses = model.fit(x, x, batch_size=4, epochs=2, verbose=0, shuffle=False).history["loss"]
        found.append([np.asarray(losses), model.predict(x, batch_size=4, verbose=0)])
        found[-1] += [model.get_layer("up").kernel.numpy()]
    assert shapes_here(model.get_layer("up").kernel) == {(4, 8 // own.mesh.size)}
    assert_close(found[1], found[0])


def test_spanning_training(tmp_path):
    """And checkpoints and files, which are those of every other layout."""
    own = strategy()
    assert own.mesh.processes_per_replica == 2
    assert own.num_replicas_in_sync == own.num_workers // 2
    # Of two replicas the last batch of three rows has unequal parts.
    model, found = trained(own, rows=19)
    wanted_model, wanted = trained(unisono.OneDeviceStrategy("cpu:0"), rows=19)
    assert_close(found, wanted)
    assert shapes_here(model.get_layer("layer_0_up").kernel) == {(grids.WIDTH, 64 // own.mesh.size)}
    assert_close(values(model), values(wanted_model))
    written = Checkpoint(model=model).write(shared(tmp_path, "checkpoint"))
    again = compiled(strategy())
    again.optimizer.build(again.trainable_variables)
    Checkpoint(model=again).restore(written)
    assert_equal(values(again), values(model))
    x, y = data(16)
    losses = [m.fit(x, y, batch_size=8, verbose=0, shuffle=False).history["loss"] for m in (model, again)]
    np.testing.assert_array_equal(*losses)
    model.save(shared(tmp_path, "model.keras"))
    loaded = keras.saving.load_model(shared(tmp_path, "model.keras"))
    assert_equal(values(loaded), values(model))
    fresh = compiled(strategy())
    fresh.optimizer.build(fresh.trainable_variables)
    fresh.load_weights(shared(tmp_path, "model.keras"))
    assert shapes_here(fresh.get_layer("layer_0_up").kernel) == {(grids.WIDTH, 64 // own.mesh.size)}
    assert_close([fresh.predict(x, verbose=0)], [model.predict(x, verbose=0)])


def test_spanning_custom_loop():
    """With batches that do not divide, and data of each replica's own."""
    found = []
    for own in (unisono.OneDeviceStrategy("cpu:0"), strategy()):
        model = compiled(own)
        x, y = data(15)
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

        def step(batch, model=model, loss_fn=loss_fn):
            x, y = batch
            with unisono.GradientTape() as tape:
                losses = loss_fn(y, model(x, training=True)).mean(-1)
                loss = unisono.nn.compute_average_loss(losses)
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
            return loss, losses

        batches = own.distribute_dataset([(x[i : i + 6], y[i : i + 6]) for i in (0, 6, 12)])
        results = [own.run(step, (b,)) for b in batches]
        sums = [own.reduce("SUM", loss, axis=None) for loss, _ in results]
        rows = [own.gather(losses, 0) for _, losses in results]
        found.append([*map(np.asarray, [*sums, *rows]), *values(model)])
        assert len(own.local_results(results[0][0])) == 1
    assert_close(found[1], found[0])


def numbers(context):
    """Batches of the numbers of one pipeline's rows."""
    every = Dataset.range(24).shard(context.num_input_pipelines, context.input_pipeline_id)
    return every.shuffle(24, seed=1).batch(2)


def test_spanning_data_of_a_function():
    own = strategy()
    contexts = []

    def make(context):
        contexts.append(context)
        return numbers(context)

    batches = own.distribute_datasets_from_function(make)
    replicas, pipeline = own.num_replicas_in_sync, own.worker_index // 2
    assert contexts == [InputContext(replicas, pipeline, replicas)]
    rows = [np.asarray(own.gather(own.run(lambda b: b, (batch,)), 0)) for batch in batches]
    assert sorted(np.concatenate(rows).tolist()) == list(range(24))
    # Each process of a replica draws rows of its own.
    apart = own.distribute_datasets_from_function(
        lambda context: Dataset.range(64).shuffle(64, seed=own.worker_index).batch(2)
    )
    with pytest.raises(unisono.InvalidArgumentError, match="All processes of a replica must make the same"):
        for _ in apart:
            pass
    made = own.experimental_distribute_values_from_function(lambda c: np.float32(c.replica_id_in_sync_group))
    total = own.reduce("SUM", own.run(lambda x: x[None] * 1.0 if x.ndim == 0 else x, (made,)), axis=0)
    assert float(np.asarray(total).sum()) == sum(range(replicas))


# Data of each worker's own have no known length: Keras learns it at the end of the first epoch.
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("policy", ["DATA", "OFF"])
def test_spanning_pipelines_in_fit(policy):
    """Shuffled without a seed on each worker; and where each replica has files of its own."""
    own = strategy()
    seen = []
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[policy]
    x, y = data(24)
    first = 0 if policy == "DATA" else 12 * (own.worker_index // 2)
    last = 24 if policy == "DATA" or own.num_replicas_in_sync == 1 else first + 12
    keras.utils.set_random_seed(own.worker_index)
    dataset = Dataset.from_tensor_slices((x[first:last], y[first:last])).shuffle(24).batch(8)
    with own.scope():
        model = grids.transformer()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.0), loss)
    history = model.fit(dataset.with_options(options), epochs=2, verbose=0).history["loss"]
    seen.append(model.evaluate(x, y, batch_size=8, verbose=0))
    # Nothing is learned: the mean of an epoch is that of all rows.
    np.testing.assert_allclose(history, [seen[0]] * 2, rtol=2e-5)


def test_spanning_first_values():
    """Workers with other seeds begin with the first one's values."""
    own = strategy()
    with own.scope():
        keras.utils.set_random_seed(own.worker_index)
        model = grids.transformer()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = data(8)
    model.fit(x, y, verbose=0)
    with unisono.OneDeviceStrategy("cpu:0").scope():
        keras.utils.set_random_seed(0)
        wanted = grids.transformer()
        wanted.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    wanted.fit(x, y, verbose=0)
    assert_close([np.asarray(v) for v in model.variables], [np.asarray(v) for v in wanted.variables])


def test_spanning_resumes(tmp_path):
    folder = shared(tmp_path, "backup")
    x, y = data(24)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 4:
                raise InterruptedError

    whole = compiled(strategy())
    whole.fit(x, y, batch_size=8, epochs=3, verbose=0)
    model = compiled(strategy())
    callbacks = [BackupAndRestore(folder, save_freq=1), Stop()]
    with pytest.raises(InterruptedError):
        model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
    again = compiled(strategy())
    again.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[BackupAndRestore(folder, save_freq=1)])
    assert_equal(values(again), values(whole))


def test_spanning_layout_by_the_program():
    """The choice is the same in all processes."""

    def make():
        tokens = keras.Input((grids.LENGTH,), dtype="int32")
        h = grids.L.Embedding(grids.WORDS, 64)(tokens)
        return keras.Model(tokens, grids.L.Dense(grids.WORDS)(grids.L.Dense(256, activation="relu")(h)))

    own = strategy("auto")
    model, found = trained(own, rows=16, make=make)
    _, wanted = trained(unisono.OneDeviceStrategy("cpu:0"), rows=16, make=make)
    assert_close(found, wanted)
    chosen = sorted(own.state_layout.chosen.items())
    assert chosen
    assert len(set(own.process_group.gather(repr(chosen).encode()))) == 1
    path, axis = chosen[0]
    variable = next(v for v in model.variables if v.path == path)
    part = list(variable.shape)
    part[axis] //= own.mesh.size
    assert shapes_here(variable) == {tuple(part)}
    # In parts from where they are read, along any axis, and then as the program says.
    again = compiled(strategy("auto"), make=make)
    given = [np.asarray(v) for v in model.variables]
    kept = [np.array(x) for x in given]
    again.set_weights(given)
    held = next(v for v in again.variables if v.shape == variable.shape)
    (shape,) = shapes_here(held)
    assert np.prod(shape) * own.mesh.size == np.prod(held.shape)
    x, y = data(16)
    assert_close([again.predict(x, verbose=0)], [model.predict(x, verbose=0)])
    again.fit(x, y, verbose=0)
    assert shapes_here(held) == {tuple(part)}
    # A step takes the memory of its parts, which must not be a user's array.
    assert_equal(given, kept)
