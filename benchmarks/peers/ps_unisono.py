"""Unisono's ParameterServerStrategy: one task of a cluster, as TF_CONFIG says; the chief measures.

Run by `parameter_server.py` with the sizes of the hidden layers, the batch, and the numbers of steps to warm
up and to measure. The chief prints one line of JSON: `{"steps_per_second": …}`.
"""

import json
import sys
import time

import unisono

strategy = unisono.ParameterServerStrategy()  # servers and workers stay here until the chief has ended

import keras
import numpy as np

hidden, batch, warm, steps = json.loads(sys.argv[1])
coordinator = unisono.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    layers = [keras.layers.Dense(n, activation="relu") for n in hidden]
    model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(0.001)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def dataset_fn():
    rng = np.random.default_rng(0)
    x = rng.random((batch * 16, 784), np.float32)
    y = rng.integers(0, 10, batch * 16)
    return unisono.data.Dataset.from_tensor_slices((x, y)).repeat().batch(batch).prefetch(4)


@unisono.function
def step_fn(iterator):
    def replica_fn(x, y):
        with unisono.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    x, y = next(iterator)
    return strategy.reduce("sum", strategy.run(replica_fn, args=(x, y)), axis=None)


iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))


def run(count):
    began = time.perf_counter()
    for _ in range(count):
        loss = coordinator.schedule(step_fn, args=(iterator,))
    coordinator.join()
    assert np.isfinite(float(loss.fetch()))
    return count / (time.perf_counter() - began)


run(warm)
print(json.dumps({"steps_per_second": run(steps)}), flush=True)
