"""Unisono's ParameterServerStrategy: one task of a cluster, as TF_CONFIG says; the chief measures.

Run by `parameter_server.py` with the sizes of the hidden layers, the batch, and the numbers of steps to warm
up and to measure. The chief prints one line of JSON: `{"steps_per_second": …, "cpu_per_step": …}`, the
seconds of CPU time of all tasks, where the system says them.
"""

import json
import os
import sys
import time
from pathlib import Path

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


def cpu_of_tasks():
    """The CPU time of all tasks until now, the children of one launcher; None where it is unknown."""
    ticks, parent = 0, str(os.getppid())
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in brackets may hold anything.
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if fields[1] == parent:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else None


def run(count):
    cpu, began = cpu_of_tasks(), time.perf_counter()
    for _ in range(count):
        loss = coordinator.schedule(step_fn, args=(iterator,))
    coordinator.join()
    assert np.isfinite(float(loss.fetch()))
    seconds, spent = time.perf_counter() - began, cpu_of_tasks()
    cpu_per_step = None if cpu is None or spent is None else (spent - cpu) / count
    return {"steps_per_second": count / seconds, "cpu_per_step": cpu_per_step}


run(warm)
print(json.dumps(run(steps)), flush=True)
