"""Checkpoints while a training on parameter servers runs: managers, files of `fit`, an evaluator beside."""

import keras
import numpy as np
import pytest

import unisono
from tests.ps_cluster import local_strategy
from unisono.checkpoint import Checkpoint, CheckpointManager
from unisono.coordinator import ClusterCoordinator


def data(rows=96):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 6)).astype("float32")
    return x, x[:, :2].sum(1, keepdims=True)


def compiled(seed=1):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def state(model):
    return [v.numpy() for v in (*model.weights, *model.optimizer.variables)]


@pytest.fixture(scope="module")
def strategy():
    with local_strategy(workers=2, servers=2, max_staleness=0) as made:
        yield made


def test_a_manager_keeps_the_last_and_training_goes_on_from_it(strategy, tmp_path):
    with strategy.scope():
        model = compiled()
    checkpoint = Checkpoint(model=model, optimizer=model.optimizer)
    manager = CheckpointManager(checkpoint, tmp_path / "kept", max_to_keep=2)
    saved = []

    class Save(keras.callbacks.Callback):
        """Saves while steps are on their way."""

        def on_train_batch_end(self, batch, logs=None):
            if batch % 2:
                # The first look at `self.model` fills the variables, as everywhere in Keras.
                saved.append(state(self.model))
                manager.save()

    fit = {"batch_size": 16, "shuffle": False, "verbose": 0}
    model.fit(*data(), callbacks=[Save()], **fit)
    manager.close()
    assert (len(saved), len(manager.checkpoints)) == (3, 2)
    model.fit(*data(), **fit)
    after = state(model)
    checkpoint.restore(manager.latest_checkpoint)
    for found, expected in zip(state(model), saved[-1], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    model.fit(*data(), **fit)
    for found, expected in zip(state(model), after, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_a_loop_with_a_coordinator_restores_what_it_saved(strategy, tmp_path):
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        total = unisono.Variable(0.0, name="total")

    @unisono.function
    def add(x):
        total.assign_add(x)
        return total.value

    checkpoint = Checkpoint(total=total)
    for _ in range(4):
        coordinator.schedule(add, args=(1.0,))
    # What was scheduled counts, although nothing has joined.
    path = checkpoint.save(tmp_path / "loop")
    coordinator.schedule(add, args=(10.0,))
    coordinator.join()
    assert float(total.numpy()) == 14.0
    checkpoint.restore(path)
    assert float(coordinator.schedule(add, args=(1.0,)).fetch()) == 5.0


def test_an_evaluator_beside_reads_the_files_of_fit(strategy, tmp_path):
    with strategy.scope():
        model = compiled()
    files = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch:02d}.weights.h5", save_weights_only=True)
    logs = model.fit(
        *data(), batch_size=16, verbose=0, validation_data=data(40), callbacks=[files], epochs=2
    ).history
    # As in the task of an evaluator, where the strategy is its local form.
    with unisono.OneDeviceStrategy("cpu:0").scope():
        beside = compiled(2)
    evaluator = unisono.SidecarEvaluator(beside, data(40), tmp_path, max_evaluations=1)
    evaluator.start()
    np.testing.assert_allclose(
        beside.evaluate(*data(40), verbose=0), [logs["val_loss"][-1], logs["val_mae"][-1]], rtol=1e-5
    )
