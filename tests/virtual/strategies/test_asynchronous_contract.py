"""What holds under parameter servers without a bound of staleness; the whole contract: `test_contract.py`.

Training gives other numbers than one device. What is computed from given weights does not.
"""

import keras
import numpy as np
import pytest

import unisono
from tests.ps_cluster import local_strategy
from unisono.checkpoint import Checkpoint

CLUSTERS = {
    "two servers": {"servers": 2},
    "divided": {"servers": 2, "variable_partitioner": unisono.partitioners.FixedShardsPartitioner(2)},
}


@pytest.fixture(params=CLUSTERS, scope="module")
def strategy(request):
    with local_strategy(workers=2, **CLUSTERS[request.param]) as made:
        yield made


def data(rows=203):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 6)).astype("float32")
    return x, (x[:, :2].sum(1) > 0).astype("int32")


def compiled(seed=1):
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


@pytest.fixture(scope="module")
def trained(strategy):
    with strategy.scope():
        model = compiled()
    history = model.fit(*data(), batch_size=16, epochs=10, verbose=0, validation_data=data(50)).history
    return model, history


def assert_same_results(model, other):
    """The last batch of 203 rows is smaller than the others."""
    x, y = data()
    for found, expected in (
        (model.evaluate(x, y, verbose=0), other.evaluate(x, y, verbose=0)),
        (model.predict(x, verbose=0), other.predict(x, verbose=0)),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_it_learns_and_each_step_counts_once(trained):
    model, history = trained
    assert int(model.optimizer.iterations.numpy()) == 10 * 13
    assert history["loss"][-1] < 0.6 * history["loss"][0]
    assert history["val_accuracy"][-1] > 0.85
    assert len(history["val_loss"]) == 10


def test_evaluation_and_predictions_are_those_of_one_device(trained):
    model, history = trained
    plain = compiled(seed=2)
    plain.set_weights(model.get_weights())
    assert_same_results(model, plain)
    # No step is in flight when an epoch is validated.
    expected = plain.evaluate(*data(50), verbose=0)
    np.testing.assert_allclose(
        [history["val_loss"][-1], history["val_accuracy"][-1]], expected, rtol=1e-5, atol=1e-6
    )


def test_a_saved_model_goes_on_without_a_cluster(trained, tmp_path):
    model, _ = trained
    model.save(tmp_path / "model.keras")
    plain = keras.saving.load_model(tmp_path / "model.keras")
    assert_same_results(model, plain)
    assert int(plain.optimizer.iterations.numpy()) == int(model.optimizer.iterations.numpy())
    for ours, theirs in zip(model.optimizer.variables, plain.optimizer.variables, strict=True):
        np.testing.assert_allclose(theirs.numpy(), ours.numpy(), rtol=1e-6)


def test_a_checkpoint_is_restored_on_the_servers_and_elsewhere(strategy, trained, tmp_path):
    model, _ = trained
    path = Checkpoint(model=model).save(tmp_path / "ckpt")
    before = model.get_weights()
    for variable in model.trainable_variables:
        variable.assign(variable.numpy() + 1)
    Checkpoint(model=model).restore(path)
    for found, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    others = [unisono.MirroredStrategy(["cpu:0", "cpu:1"]), strategy]
    for other in others:
        with other.scope():
            twin = compiled(seed=2)
        Checkpoint(model=twin).restore(path)
        assert_same_results(model, twin)
        assert int(twin.optimizer.iterations.numpy()) == int(model.optimizer.iterations.numpy())


def test_an_error_of_a_step_leaves_the_cluster_usable(strategy):
    with strategy.scope():
        wrong, model = compiled(), compiled()
        wrong.compile("adam", lambda y, p: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        wrong.fit(*data(), verbose=0)
    before = model.evaluate(*data(), verbose=0)[0]
    assert model.fit(*data(), epochs=3, verbose=0).history["loss"][-1] < before


def test_steps_of_the_chief_and_of_workers_change_the_same_variables(strategy, trained):
    model, _ = trained
    weight, one = model.layers[0].bias, np.ones(8, "float32")
    before = weight.numpy()

    def step():
        weight.assign_add(one)

    function = unisono.function(lambda: strategy.run(step))
    coordinator = unisono.coordinator.ClusterCoordinator(strategy)
    strategy.run(step)
    for _ in range(2):
        coordinator.schedule(function)
        function()
    coordinator.join()
    np.testing.assert_allclose(weight.numpy(), before + 5, rtol=1e-5)
    plain = compiled(seed=2)
    plain.set_weights(model.get_weights())
    assert_same_results(model, plain)
