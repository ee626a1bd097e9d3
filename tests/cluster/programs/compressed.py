"""Trains with compressed gradients and by local updates; prints what this interface sends in a step."""

import sys
from pathlib import Path

import unisono


def outer():
    return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)


# First: it makes a device for exchanges.
sync = unisono.LocalUpdates(10, outer, fragments=2, overlap=2)
strategies = {"overlap": unisono.MultiWorkerMirroredStrategy(sync=sync)}
strategies |= {
    name: unisono.MultiWorkerMirroredStrategy(cross_device_ops=ops)
    for name, ops in {
        "exact": None,
        "bfloat16": unisono.CompressedAllReduce(),
        "float16": unisono.CompressedAllReduce("float16"),
        "int8": unisono.CompressedAllReduce("int8"),
        "power_sgd": unisono.CompressedAllReduce("power_sgd", rank=4),
        "top_k": unisono.CompressedAllReduce("top_k", k=0.01),
    }.items()
}
for name, fragments in (("local", 1), ("fragments", 2)):
    sync = unisono.LocalUpdates(10, outer, fragments)
    strategies[name] = unisono.MultiWorkerMirroredStrategy(sync=sync)

import keras
import numpy as np

from unisono.checkpoint import Checkpoint
from unisono.step._dispatch import CompiledStep

STEPS = 30
folder = Path(sys.argv[1])
x = np.random.default_rng(0).normal(size=(STEPS * 12, 128)).astype("float32")


def sent():
    (line,) = (each for each in Path("/proc/self/net/dev").read_text().splitlines() if "eth0" in each)
    return int(line.split()[9])


def compiled(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((128,)), keras.layers.Dense(256), keras.layers.Dense(128)])
        model.compile(keras.optimizers.SGD(1.0), "mse", metrics=["mae"])
    return model


def fit(model, epochs=1):
    return model.fit(x, x, batch_size=12, epochs=epochs, shuffle=False, verbose=0).history["loss"][-1]


def state(model):
    return [np.asarray(v) for v in [*model.variables, *model.optimizer.variables]]


# Whether each program is for the devices that train, and exchanges anything.
programs, jaxpr_of = [], CompiledStep.jaxpr


def noted(self, *arguments):
    text = self.lower(*arguments).compile().as_text()
    trains = self._mesh == strategies["overlap"].mesh
    programs.append((trains, any(f" {each}(" in text for each in ("all-reduce", "collective-permute"))))
    return jaxpr_of(self, *arguments)


for name, strategy in strategies.items():
    model = compiled(strategy)
    CompiledStep.jaxpr = noted if name == "overlap" else jaxpr_of
    fit(model)
    if name == "overlap":
        print("replicas", strategy.num_replicas_in_sync, "programs", sorted(programs), flush=True)
    before = sent()
    loss = fit(model, 2)
    print(f"{name} loss {loss:.8f} sent {(sent() - before) / (2 * STEPS):.0f}", flush=True)
    if name not in ("int8", "local"):
        continue
    path = Checkpoint(model=model).write(str(folder / name))
    other = compiled(strategy)
    Checkpoint(model=other).restore(path)
    fit(model), fit(other)
    pairs = zip(state(model), state(other), strict=True)
    print("resumed with the same bits", all(np.array_equal(a, b) for a, b in pairs), flush=True)
