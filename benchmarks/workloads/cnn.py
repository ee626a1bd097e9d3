"""Small CNNs on 28x28x1: one or three convolutions, with or without max-pooling."""

import functools

from workloads import Workload, random_data


def keras_model(convolutions, pooling):
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            *[layers.Conv2D(32, 3, activation="relu") for _ in range(convolutions)],
            *([layers.MaxPooling2D()] if pooling else []),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )


def flat_features(convolutions, pooling):
    side = 28 - 2 * convolutions
    return 32 * (side // 2 if pooling else side) ** 2


def torch_model(convolutions, pooling):
    from torch import nn

    layers, channels = [], 1
    for _ in range(convolutions):
        layers += [nn.Conv2d(channels, 32, 3), nn.ReLU()]
        channels = 32
    if pooling:
        layers.append(nn.MaxPool2d(2))
    hidden = nn.Linear(flat_features(convolutions, pooling), 64)
    return nn.Sequential(*layers, nn.Flatten(), hidden, nn.ReLU(), nn.Linear(64, 10))


def jax_model(convolutions, pooling, key):
    import jax
    import jax.numpy as jnp
    from jax import lax

    keys = iter(jax.random.split(key, convolutions + 2))

    def weights(*shape):
        fan_in = 1
        for n in shape[:-1]:
            fan_in *= n
        return jax.random.normal(next(keys), shape) / fan_in**0.5, jnp.zeros(shape[-1])

    kernels = [weights(3, 3, 32 if i else 1, 32) for i in range(convolutions)]
    params = kernels, weights(flat_features(convolutions, pooling), 64), weights(64, 10)

    def apply(params, x):
        kernels, hidden, last = params
        for w, b in kernels:
            x = lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu(x + b)
        if pooling:
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = jax.nn.relu(x.reshape(len(x), -1) @ hidden[0] + hidden[1])
        return x @ last[0] + last[1]

    return params, apply


def workload(convolutions, pooling=True, steps=None):
    bound = [functools.partial(f, convolutions, pooling) for f in (keras_model, torch_model, jax_model)]
    usual, rounds = (32, 5) if convolutions == 1 else (8, 3)
    return Workload(steps or usual, rounds, random_data((28, 28, 1), 10), *bound, image=True)
