"""What a step costs whose rows must be computed together: one program that XLA divides, or all on each.

    python benchmarks/together.py [--devices 8] [--cases pairs queue centered small mixing] [--rounds 7]
    python benchmarks/together.py --processes 2

`joined` is one program over a batch that lies split on the devices: XLA adds the exchange. `whole` is a
program in which every device computes all rows. `one device` is the same model on the first device. All are
measured in turns in one process, so that other work on the machine disturbs each alike. CPU time is that of
the whole process, for all its devices: where devices have cores of their own, a step of `whole` takes its CPU
time divided by the number of devices. Collectives and temporary memory are those of the compiled program, on
one device.
"""

import argparse
import collections
import os
import re
import statistics
import subprocess
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import unisono  # isort: skip
import jax
import keras
import numpy as np
from keras import ops

from unisono.training.trainer._lowered_step import lowered_step

COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all"
#: Steps of a round, in one call of `fit`.
STEPS = 10


class Queue(keras.layers.Layer):
    """A queue of keys as in MoCo: similarities to its entries; a batch takes the place of the oldest."""

    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self.size = size

    def build(self, shape):
        """Make the weights."""
        self.queue = self.add_weight(shape=(self.size, shape[-1]), trainable=False, name="queue")

    def call(self, x, training=False):
        """Apply the layer."""
        keys = ops.stop_gradient(x)
        similarities = ops.matmul(x, ops.transpose(self.queue))
        if training:
            self.queue.assign(ops.concatenate([keys, self.queue[: self.size - x.shape[0]]]))
        own = ops.sum(x * keys, axis=-1, keepdims=True)
        return ops.concatenate([own, similarities], axis=-1)


class Mixing(keras.layers.Layer):
    """Attention between the rows of a batch, over the mean of each row's positions."""

    def build(self, shape):
        """Make the weights."""
        self.dense = keras.layers.Dense(shape[-1])
        self.dense.build(shape)

    def call(self, x):
        """Apply the layer."""
        mean = ops.mean(x, axis=1)
        scores = ops.softmax(ops.matmul(mean, ops.transpose(mean)))
        return x + self.dense(ops.matmul(scores, mean)[:, None])


class Normed(keras.layers.Layer):
    """Vectors of length 1."""

    def call(self, x):
        """Apply the layer."""
        return x * ops.rsqrt(ops.sum(ops.square(x), axis=-1, keepdims=True) + 1e-6)


class Similarities(keras.layers.Layer):
    """Similarities of all pairs of rows."""

    def call(self, x):
        """Apply the layer."""
        return ops.matmul(x, ops.transpose(x)) / 0.1


class Centered(keras.layers.Layer):
    """Rows minus the mean of all."""

    def call(self, x):
        """Apply the layer."""
        return x - ops.mean(x, axis=0)


def pairs():
    """A contrastive model: 1,024 rows of 256 numbers, and similarities of all pairs."""
    inputs = keras.Input((256,))
    x = keras.layers.Dense(256, activation="relu")(inputs)
    model = keras.Model(inputs, Similarities()(Normed()(keras.layers.Dense(256)(x))))
    return model, np.random.default_rng(0).normal(size=(1024, 256)), np.arange(1024)


def queue():
    """A queue of 4,096 keys of 128 numbers behind an encoder, for batches of 256 rows."""
    inputs = keras.Input((512,))
    x = keras.layers.Dense(512, activation="relu")(inputs)
    model = keras.Model(inputs, Queue(4096)(Normed()(keras.layers.Dense(128)(x))))
    return model, np.random.default_rng(0).normal(size=(256, 512)), np.zeros(256)


def centered(width=1024, layers=8, rows=256):
    """`t - mean(t, axis=0)` in the middle of eight dense layers of 1,024 units."""
    x = inputs = keras.Input((width,))
    for i in range(layers):
        x = keras.layers.Dense(width, activation="relu")(x)
        if i == layers // 2:
            x = Centered()(x)
    data = np.random.default_rng(0).normal(size=(rows, width))
    return keras.Model(inputs, keras.layers.Dense(10)(x)), data, np.zeros(rows)


def small():
    """The same in two layers of 32 units, with 32 rows: a step that takes less time than a message."""
    return centered(32, 2, 32)


def mixing():
    """Two blocks of a transformer with attention between rows behind the first; 64 rows of 64 positions."""
    inputs = keras.Input((64,), dtype="int32")
    x = keras.layers.Embedding(1000, 128)(inputs)
    for i in range(2):
        attended = keras.layers.MultiHeadAttention(4, 32)(*[keras.layers.LayerNormalization()(x)] * 2)
        x = x + attended
        hidden = keras.layers.Dense(512, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(128)(hidden)
        x = Mixing()(x) if i == 0 else x
    tokens = np.random.default_rng(0).integers(0, 1000, (64, 64))
    return keras.Model(inputs, keras.layers.Dense(1000)(x)), tokens, tokens


CASES = {each.__name__: each for each in (pairs, queue, centered, small, mixing)}


class Measured:
    """One model on one strategy, computed in one way.

    Args:
        joins: whether rows are computed together by one program.
    """

    def __init__(self, case, strategy, joins):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            self.model, x, y = CASES[case]()
            self.model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        self.x, self.y = x.astype("int32" if x.dtype.kind == "i" else "float32"), y.astype("int32")
        self.model.make_train_function()
        policy = self.model.train_function.batch_policy
        policy._joins = joins
        self.loss = self.model.train_on_batch(self.x, self.y)
        self.many = [np.concatenate([part] * STEPS) for part in (self.x, self.y)]
        self.wall, self.cpu = [], []

    def run(self):
        """Train one round; note milliseconds of a step."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.model.fit(*self.many, batch_size=len(self.x), shuffle=False, verbose=0)
        self.wall.append(1e3 * (time.perf_counter() - wall) / STEPS)
        self.cpu.append(1e3 * (time.process_time() - cpu) / STEPS)

    def program(self):
        """Return the compiled program's collectives in words, and MiB of temporary memory of a device."""
        compiled = lowered_step(self.model, self.x, self.y).compile()
        found = collections.Counter(
            kind
            for kind in COLLECTIVES
            for _ in re.findall(rf"= [^=\n]* {kind}(?:-start)?\(", compiled.as_text())
        )
        words = ", ".join(f"{n} {kind}" for kind, n in found.items()) or "none"
        return words, compiled.memory_analysis().temp_size_in_bytes / 2**20


def measure(case, ways, rounds):
    """Measure a case in each way in turns, and print a line for each."""
    measured = {name: Measured(case, *way) for name, way in ways.items()}
    for number in range(1 + rounds):
        for each in measured.values():
            each.run()
            if number == 0:  # the first round compiles
                each.wall.clear(), each.cpu.clear()
    for name, each in measured.items():
        words, memory = each.program()
        wall, cpu = (statistics.median(part) for part in (each.wall, each.cpu))
        spread = f"{min(each.wall):.1f} to {max(each.wall):.1f}"
        cells = case, name, f"{wall:.1f} ({spread})", f"{cpu:.1f}", words, f"{memory:.1f}", f"{each.loss:.5f}"
        print("| " + " | ".join(cells) + " |", flush=True)


def head():
    columns = "case", "computed", "ms a step", "CPU ms", "collectives", "temporary MiB", "first loss"
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)


def in_devices(options):
    """Measure all cases on virtual devices of this process."""
    jax.config.update("jax_num_cpu_devices", options.devices)
    replicas = unisono.MirroredStrategy([f"cpu:{i}" for i in range(options.devices)])
    one = unisono.OneDeviceStrategy("cpu:0")
    head()
    for case in options.cases:
        measure(
            case,
            {"joined": (replicas, True), "whole": (replicas, False), "one device": (one, False)},
            options.rounds,
        )


def in_process(options):
    """Measure all cases in one of several processes. CPU time is that of this process."""
    strategy = unisono.MultiWorkerMirroredStrategy()
    head()
    for case in options.cases:
        measure(case, {"joined": (strategy, True), "whole": (strategy, False)}, options.rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--task", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        in_process(options)
    elif options.processes > 1:
        command = [
            sys.executable,
            "-m",
            "unisono",
            "launch",
            "-n",
            str(options.processes),
            __file__,
            "--task",
        ]
        command += ["--rounds", str(options.rounds), "--cases", *options.cases]
        sys.exit(subprocess.run(command, check=False).returncode)
    else:
        in_devices(options)


if __name__ == "__main__":
    main()
