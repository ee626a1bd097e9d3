"""What `fit`, `evaluate` and `predict` take for data, and what they say of data that they cannot use."""

import keras
import numpy as np
import pytest

import unisono
from unisono.data import Dataset

X = np.random.default_rng(0).normal(size=(22, 3)).astype("f4")
Y = X.sum(1, keepdims=True)


@pytest.fixture(scope="module")
def strategy():
    return unisono.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture(scope="module")
def model(strategy):
    with strategy.scope():
        return compiled()


def compiled():
    layers = [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def rows(size):
    return Dataset.from_tensor_slices((X, Y)).batch(size)


SOURCES = {
    "dataset": lambda s: s.distribute_dataset(rows(8)),
    "list": lambda s: s.distribute_dataset([[X[i : i + 8], Y[i : i + 8]] for i in range(0, 22, 8)]),
    "function": lambda s: s.distribute_dataset(lambda: iter(rows(8))),
    "dataset_fn": lambda s: s.distribute_datasets_from_function(lambda _: rows(4)),
}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("source", SOURCES)
def test_distributed_data_trains_like_one_device(strategy, source):
    single = compiled()
    expected = single.fit(X, Y, 8, epochs=2, shuffle=False, verbose=0).history
    with strategy.scope():
        model = compiled()
    data = SOURCES[source](strategy)
    history = model.fit(data, epochs=2, validation_data=data, verbose=0).history
    for name, numbers in expected.items():
        np.testing.assert_allclose(history[name], numbers, rtol=1e-5)
    np.testing.assert_allclose(model.evaluate(data, verbose=0), single.evaluate(X, Y, verbose=0), rtol=1e-5)
    np.testing.assert_allclose(model.predict(data, verbose=0), single.predict(X, verbose=0), rtol=1e-5)


def test_distributed_data_of_another_strategy_is_refused(model):
    data = unisono.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]).distribute_dataset(rows(8))
    with pytest.raises(unisono.MixedStrategyError, match="made by the strategy of the model"):
        model.fit(data)
