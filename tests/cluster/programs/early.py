"""A custom loop that one of two workers leaves: `break` on worker 1, or `evaluate` on the chief alone."""

import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

import unisono

folder, mode = Path(sys.argv[1]), sys.argv[2]
worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
strategy = unisono.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x, y = np.ones((8, 6), np.float32), np.ones((8, 1), np.float32)


@unisono.function
def step(batch):
    losses = strategy.run(lambda b: keras.ops.mean((model(b[0]) - b[1]) ** 2), args=(batch,))
    return strategy.reduce("SUM", losses, axis=None)


try:
    for i, batch in enumerate(strategy.experimental_distribute_dataset([(x, y)] * 10)):
        if i == 4 and mode == "break" and worker == 1:
            break
        if i == 4 and mode == "evaluate" and worker == 0:
            model.evaluate(x, y)
        float(step(batch))
except unisono.ClusterError:
    (folder / f"raised-{worker}").write_text(str(time.time()))
    raise
finally:
    (folder / f"left-{worker}").write_text(str(time.time()))
