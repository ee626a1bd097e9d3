"""Models on scikit-learn's digits, trained by plain Keras or by a strategy, and compared."""

import contextlib
import functools
import os

import keras
import numpy as np
from sklearn.datasets import load_digits

import unisono
from tests.support import devices

L = keras.layers

#: float32 sums in another order differ in the last bits. Adam divides by the root of squared
#: gradients, so where these are near zero the bits come forward: hence the absolute part.
LOSSES = {"rtol": 1e-5, "atol": 1e-6}
PREDICTIONS = {"rtol": 1e-3, "atol": 1e-4}
WEIGHTS = {"rtol": 2e-4, "atol": 2e-5}


@functools.cache
def digits():
    data = load_digits()
    return (data.data / 16).astype("f4"), data.target.astype("i4")


def mlp(*extra):
    return keras.Sequential([keras.Input((64,)), L.Dense(32, activation="relu"), *extra, L.Dense(10)])


def cnn():
    return keras.Sequential(
        [
            keras.Input((64,)),
            L.Reshape((8, 8, 1)),
            L.Conv2D(8, 3, strides=2, activation="relu"),
            L.Flatten(),
            L.Dense(10),
        ]
    )


def crossentropy(**kwargs):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)


#: In a process of a cluster its strategy stands for all numbers of replicas.
IN_CLUSTER = "TF_CONFIG" in os.environ
if IN_CLUSTER:
    # Before plain Keras starts JAX with this process' devices alone.
    _CLUSTER = unisono.MultiWorkerMirroredStrategy()


def mirrored(replicas):
    if IN_CLUSTER:
        return _CLUSTER
    return unisono.MirroredStrategy(devices(replicas))


def train(replicas, build, compile_with, *, data=None, batch_size=50, epochs=2, seed=7, **fit):
    """Train on so many replicas, or by plain Keras for 0; return everything worth comparing."""
    x, y = data if data is not None else digits()
    keras.utils.set_random_seed(seed)
    scope = mirrored(replicas).scope() if replicas else contextlib.nullcontext()
    with scope:
        model = build()
        model.compile(**compile_with())
    fit = {"shuffle": False, "verbose": 0, **fit}
    history = model.fit(x, y, batch_size=batch_size, epochs=epochs, **fit).history
    return {
        "model": model,
        "history": history,
        "weights": model.get_weights(),
        "evaluation": model.evaluate(x, y, batch_size=batch_size, verbose=0, return_dict=True),
        "predictions": model.predict(x, batch_size=batch_size, verbose=0),
    }


def assert_equal(found, expected, losses=LOSSES, weights=WEIGHTS, predictions=PREDICTIONS):
    assert found["history"].keys() == expected["history"].keys()
    for key, values in expected["history"].items():
        np.testing.assert_allclose(found["history"][key], values, err_msg=key, **losses)
    for key, value in expected["evaluation"].items():
        np.testing.assert_allclose(found["evaluation"][key], value, err_msg=key, **losses)
    for a, b in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(a, b, **weights)
    for a, b in zip(_leaves(found), _leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **predictions)


def _leaves(result):
    predictions = result["predictions"]
    return predictions if isinstance(predictions, list) else [predictions]
