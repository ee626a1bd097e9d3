"""`model_to_estimator` against `fit` and `evaluate` of the same model."""

import keras
import numpy as np
import pytest

import unisono
from unisono.data import Dataset
from unisono.estimator import RunConfig, model_to_estimator

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 4)).astype("float32")
Y = RNG.integers(0, 3, 48)


def make(is_functional=False):
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(6, "relu", kernel_regularizer="l2"), keras.layers.Dense(3, "softmax")]
    inputs = keras.Input((4,))
    if is_functional:
        model = keras.Model(inputs, layers[1](layers[0](inputs)))
    else:
        model = keras.Sequential([inputs, *layers])
    model.compile(keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def data(batch):
    return lambda: Dataset.from_tensor_slices((X, Y)).batch(batch)


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_is_that_of_fit(replicas, tmp_path):
    model = make(is_functional=replicas == 2)
    strategy = unisono.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    config = RunConfig(train_distribute=strategy, save_summary_steps=0)
    estimator = model_to_estimator(
        model, model_dir=tmp_path, config=config, metric_names_map={"accuracy": "acc"}
    )
    start = estimator.evaluate(data(48))
    np.testing.assert_allclose([start["loss"], start["acc"]], model.evaluate(X, Y, verbose=0), rtol=1e-4)
    estimator.train(data(12 // replicas))
    model.fit(X, Y, batch_size=12, shuffle=False, verbose=0)
    for name, layer, part in (("dense", -2, "kernel"), ("dense_1", -1, "bias")):
        paths = [n for n in estimator.get_variable_names() if n.endswith(f"/{part}")]
        found = [estimator.get_variable_value(n) for n in paths]
        wanted = getattr(model.layers[layer], part).value
        assert any(f.shape == wanted.shape and np.allclose(f, wanted, atol=2e-5) for f in found), name
    probabilities = [p[model.layers[-1].name] for p in estimator.predict(data(48))]
    np.testing.assert_allclose(probabilities, model.predict(X, verbose=0), atol=1e-4)


def test_errors(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match="has not been compiled"):
        model_to_estimator(model)
    with pytest.raises(ValueError, match="needs to be provided"):
        model_to_estimator()
