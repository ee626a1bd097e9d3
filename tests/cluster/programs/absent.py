"""A custom loop outside of the scope, in which one worker disappears: `absent.py FOLDER VICTIM [unequal]`.

The other one notes what each way to speak with it says then, and ends with an error that nobody catches.
With `unequal` nobody disappears: one worker is given fewer rows by `train_on_batch`.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import unisono

strategy = unisono.MultiWorkerMirroredStrategy()

import keras
import numpy as np


folder, victim = Path(sys.argv[1]), int(sys.argv[2])
WORKER = strategy.worker_index
x = np.random.default_rng(0).normal(size=(32, 6)).astype("f4")
y = x.sum(1, keepdims=True)

# Each would begin with other weights.
keras.utils.set_random_seed(WORKER)
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)
    loss = keras.losses.MeanSquaredError()
    model.compile("sgd", "mse")


def step(batch):
    inputs, targets = batch
    with unisono.GradientTape() as tape:
        value = loss(targets, model(inputs, training=True))
    gradients = tape.gradient(value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return value


@unisono.function
def whole(batch):
    return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)


def own_batches(context):
    return [(x[:8], y[:8])] * 4


def unequal():
    before = strategy.process_group.num_collectives
    for i in range(4):
        rows = 6 if victim == WORKER and i == 3 else 8
        if i == 1:
            before = strategy.process_group.num_collectives
        model.train_on_batch(x[:rows], y[:rows])
        (folder / f"collectives-{WORKER}").write_text(str(strategy.process_group.num_collectives - before))


if sys.argv[3:] == ["unequal"]:
    unequal()
    sys.exit()

batches = list(strategy.distribute_dataset([(x[i : i + 8], y[i : i + 8]) for i in range(0, 32, 8)]))
per_worker = strategy.distribute_datasets_from_function(own_batches)
for batch in batches:
    values = strategy.run(step, args=(batch,))
    inputs = strategy.run(lambda b: b[0], args=(batch,))
    total = whole(batch)
    strategy.reduce("MEAN", values, axis=None)
    strategy.gather(inputs, axis=0)
list(per_worker)
float(total)
weights = b"".join(np.ascontiguousarray(w).tobytes() for w in model.get_weights())
(folder / f"weights-{WORKER}").write_text(hashlib.sha256(weights).hexdigest())
(folder / f"trained-{WORKER}").touch()
if victim == WORKER:
    while not (folder / f"trained-{1 - WORKER}").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def in_scope():
    with strategy.scope():
        float(whole(batches[0]))


def until_it_fails(call):
    """Steps are started ahead: the error of one shows a few steps later."""
    for _ in range(100):
        call()


calls = {
    "function": lambda: until_it_fails(lambda: whole(batches[0])),
    "run": lambda: until_it_fails(lambda: strategy.run(step, args=(batches[0],))),
    "reduce": lambda: until_it_fails(lambda: strategy.reduce("MEAN", values, axis=None)),
    "gather": lambda: strategy.gather(inputs, axis=0),
    "iteration": lambda: list(per_worker),
    "scope": in_scope,
    "evaluate": lambda: model.evaluate(x, y, batch_size=8, verbose=0),
}
found = {}
for name, call in calls.items():
    try:
        call()
    except Exception as error:
        found[name] = [type(error).__name__, str(error)]
(folder / "found.json").write_text(json.dumps(found))
# Outside of all that the library could catch.
float(strategy.reduce("MEAN", values, axis=None))
