"""Train on workers, with parameter servers where there are some, and evaluate the last weights beside.

Arguments: a folder in common, and the exit code of the evaluator in generation 0; 0 goes on.
"""

import json
import os
import sys
import time
from pathlib import Path

import unisono

own = json.loads(os.environ["TF_CONFIG"])
is_evaluator = own["task"]["type"] == "evaluator"
folder, code = sys.argv[1], int(sys.argv[2])
if is_evaluator and code and os.environ["UNISONO_GENERATION"] == "0":
    sys.exit(code)
is_served = "ps" in own["cluster"] and not is_evaluator
# Of the evaluator: its own devices alone.
strategy = unisono.ParameterServerStrategy() if is_served else unisono.MultiWorkerMirroredStrategy()

import keras
import numpy as np

from unisono.checkpoint._markers import is_watched

keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
if is_evaluator:
    found = unisono.SidecarEvaluator(model, (x, x[:, :1]), folder, poll_interval=0.2).start()
    print("evaluated", found[-1][1]["loss"], flush=True)
else:
    # The evaluator may start later: the last backup is left for one that watches.
    deadline = time.monotonic() + 300
    while not is_watched(Path(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    backup = unisono.callbacks.BackupAndRestore(folder)
    model.fit(x, x[:, :1], epochs=2, batch_size=8, shuffle=False, verbose=0, callbacks=[backup])
    print("trained", model.evaluate(x, x[:, :1], verbose=0), flush=True)
