"""The MLP of the tutorials: 784, 256, 128, 10."""

import itertools

from workloads import Workload, random_data

SIZES = [784, 256, 128, 10]


def keras_model():
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(256, activation="relu"),
            layers.Dense(128, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )


def torch_model():
    import torch

    layers = []
    for a, b in itertools.pairwise(SIZES):
        layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def jax_model(key):
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(key, len(SIZES) - 1)
    pairs = itertools.pairwise(SIZES)
    params = [
        (jax.random.normal(k, ab) / ab[0] ** 0.5, jnp.zeros(ab[1])) for k, ab in zip(keys, pairs, strict=True)
    ]

    def apply(params, x):
        for w, b in params[:-1]:
            x = jax.nn.relu(x @ w + b)
        w, b = params[-1]
        return x @ w + b

    return params, apply


def workload(steps=192):
    return Workload(steps, 5, random_data((784,), 10), keras_model, torch_model, jax_model)
