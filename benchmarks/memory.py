"""Memory of a training step on each replica, and its time, in each state layout.

python benchmarks/memory.py [--replicas 1 2 4 8] [--width 512] [--layers 8] [--steps 20]

For each layout: bytes that rest on the first replica; what a step needs there at most, by XLA's plan (what
rests, and its temporary buffers); what that is with everything of the weights in parts and two layers whole,
`4 * weights / n + 2 * layer`; and the time of a step. `--peak` prints the largest resident memory of a
process that trains in one layout, for all of its virtual devices together.
"""

import argparse
import gc
import os
import resource
import statistics
import subprocess
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import unisono  # isort: skip
import jax
import keras
import numpy as np

from unisono.strategies._replicated import LAYOUTS
from unisono.training.trainer._lowered_step import lowered_step

MIB = 2**20


def compiled(width, layers):
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def measure(layout, replicas, width, layers, steps):
    """Return bytes that rest on the first replica, bytes that a step needs there, and seconds of a step."""
    strategy = unisono.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], state_layout=layout)
    before = bytes_on_first_device()
    with strategy.scope():
        model = compiled(width, layers)
    rows = 32 * replicas
    x = np.random.default_rng(0).normal(size=(rows, width)).astype("float32")
    y = np.zeros(rows, "int32")
    seconds = timed(model, x, y, steps)
    rests = bytes_on_first_device() - before
    plan = lowered_step(model, x, y).compile().memory_analysis()
    new = plan.output_size_in_bytes - plan.alias_size_in_bytes
    return rests, plan.argument_size_in_bytes + plan.temp_size_in_bytes + new, seconds


def timed(model, x, y, steps):
    model.train_on_batch(x, y)
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        model.train_on_batch(x, y)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) if seconds else 0.0


def bytes_on_first_device():
    gc.collect()
    shards = [s for array in jax.live_arrays() for s in array.addressable_shards]
    return sum(s.data.nbytes for s in shards if s.device.id == 0)


def model_parallel(replicas, width, layers, steps):
    """Return seconds of a step under `keras.distribution.ModelParallel`: kernels split over all devices."""
    mesh = keras.distribution.DeviceMesh((1, replicas), ["batch", "model"])
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*kernel"] = (None, "model")
    layout["dense_[0-9]*/bias"] = ("model",)
    strategy = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    keras.distribution.set_distribution(strategy)
    rows = 32 * replicas
    x = np.random.default_rng(0).normal(size=(rows, width)).astype("float32")
    # As many classes as devices divide: ten kernels' columns are split, too.
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(16)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return timed(model, x, np.zeros(rows, "int32"), steps)


def print_table(options):
    weights = 4 * (options.layers * (options.width + 1) * options.width + 10 * (options.width + 1))
    print(f"{'layout':14} {'n':>2} {'rests, MiB':>11} {'at most':>8} {'4w/n+2l':>8} {'ms a step':>10}")
    for replicas in options.replicas:
        for layout in LAYOUTS if replicas > 1 else LAYOUTS[:1]:
            keras.backend.clear_session()
            rests, needs, seconds = measure(layout, replicas, options.width, options.layers, options.steps)
            bound = (4 * weights / replicas + 2 * 4 * options.width**2) / MIB
            sizes = f"{rests / MIB:11.1f} {needs / MIB:8.1f} {bound:8.1f}"
            print(f"{layout:14} {replicas:2} {sizes} {seconds * 1e3:10.1f}", flush=True)
        if replicas > 1 and replicas == len(jax.devices()):
            keras.backend.clear_session()
            seconds = model_parallel(replicas, options.width, options.layers, options.steps)
            print(f"{'ModelParallel':14} {replicas:2} {'':29} {seconds * 1e3:10.1f}", flush=True)


def print_peaks(options):
    """Print the largest resident memory of a process in each layout, less that of one which only imports."""
    shape = ["--width", str(options.width), "--layers", str(options.layers)]
    for replicas in options.replicas:
        for layout in LAYOUTS if replicas > 1 else LAYOUTS[:1]:
            command = [sys.executable, __file__, *shape, "--replicas", str(replicas), "--one", layout]
            found = subprocess.run(command, check=True, capture_output=True, text=True)
            print(f"{layout:14} {replicas:2} {found.stdout.strip():>8} MiB", flush=True)


def print_own_peak(options):
    (replicas,), layout = options.replicas, options.one
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    strategy = unisono.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], state_layout=layout)
    with strategy.scope():
        model = compiled(options.width, options.layers)
    x = np.zeros((32 * replicas, options.width), "float32")
    timed(model, x, np.zeros(len(x), "int32"), 5)
    print(f"{(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - idle) / 1024:.0f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--peak", action="store_true", help="the largest resident memory instead")
    parser.add_argument("--one", choices=LAYOUTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print_peaks(options)
        return
    jax.config.update("jax_num_cpu_devices", max(options.replicas))
    if options.one:
        print_own_peak(options)
    else:
        print_table(options)


if __name__ == "__main__":
    main()
