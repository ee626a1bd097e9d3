"""Memory of an optimizer on each replica, and the time of a step, replicated and in parts.

python benchmarks/memory.py [--replicas 2] [--width 1024] [--steps 30]
"""

import argparse
import gc
import os
import statistics
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import unisono  # isort: skip
import jax
import keras
import numpy as np


def measure(layout, replicas, width, steps):
    """Return bytes of optimizer state on the first replica, and seconds of a step."""
    strategy = unisono.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], state_layout=layout)
    before = bytes_on_first_device()
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((width,)),
                *[keras.layers.Dense(width, activation="relu") for _ in range(3)],
                keras.layers.Dense(10),
            ]
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rows = 32 * replicas
    x = np.random.default_rng(0).normal(size=(rows, width)).astype("float32")
    y = np.zeros(rows, "int32")
    model.train_on_batch(x, y)
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        model.train_on_batch(x, y)
        seconds.append(time.perf_counter() - began)
    # Weights are whole in both layouts.
    weights = sum(4 * int(np.prod(v.shape)) for v in model.variables)
    return bytes_on_first_device() - before - weights, statistics.median(seconds)


def bytes_on_first_device():
    gc.collect()
    shards = [s for array in jax.live_arrays() for s in array.addressable_shards]
    return sum(s.data.nbytes for s in shards if s.device.id == 0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    print(f"{'layout':10} {'MiB a replica':>14} {'ms a step':>10}")
    for layout in ("mirrored", "sharded"):
        keras.backend.clear_session()
        size, seconds = measure(layout, options.replicas, options.width, options.steps)
        print(f"{layout:10} {size / 2**20:14.1f} {seconds * 1e3:10.1f}")


if __name__ == "__main__":
    main()
