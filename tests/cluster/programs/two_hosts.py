"""One program for every strategy of several processes; its TF_CONFIG says which."""

import argparse
import importlib.metadata
import json
import os
import time
from pathlib import Path

import unisono

parser = argparse.ArgumentParser()
parser.add_argument("--interface", help="over which workers connect")
parser.add_argument("--heartbeat", type=float, default=3.0)
parser.add_argument("--collective", type=float, default=600.0)
parser.add_argument("--backup", type=Path, help="the folder of backups, one each ten steps")
parser.add_argument("--pause", type=Path, help="a folder: after 20 steps the chief waits for its file `go`")
parser.add_argument("--evaluate", type=Path, help="the folder of the checkpoints for an evaluator")
parser.add_argument("--version", help="of Unisono, in place of the true one")
flags = parser.parse_args()

if flags.version:
    true_version = importlib.metadata.version
    importlib.metadata.version = lambda name: flags.version if name == "unisono" else true_version(name)

config = json.loads(os.environ["TF_CONFIG"])
if "ps" in config["cluster"]:
    strategy = unisono.ParameterServerStrategy()
else:
    strategy = unisono.MultiWorkerMirroredStrategy(
        communication_options=unisono.CommunicationOptions(interface=flags.interface),
        timeouts=unisono.cluster_resolver.Timeouts(heartbeat=flags.heartbeat, collective=flags.collective),
    )

import keras
import numpy as np


class Pause(keras.callbacks.Callback):
    """Lets the test cut links while the other workers wait for the chief."""

    chief_only = True

    def on_train_batch_end(self, batch, logs=None):
        if batch == 20 and not (flags.pause / "go").exists():
            (flags.pause / "waits").touch()
            while not (flags.pause / "go").exists():
                time.sleep(0.01)


keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(320, 4)).astype("float32")
if config["task"]["type"] == "evaluator":
    evaluator = unisono.SidecarEvaluator(model, (x, x), str(flags.evaluate))
    print("evaluated", len(evaluator.start()), flush=True)
else:
    callbacks = [Pause()] if flags.pause else []
    if flags.backup:
        callbacks.append(unisono.callbacks.BackupAndRestore(str(flags.backup), save_freq=10))
    if flags.evaluate:
        callbacks.append(keras.callbacks.ModelCheckpoint(flags.evaluate / "{epoch:02d}.keras"))
    model.fit(x, x, epochs=2, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
    if flags.evaluate and strategy.is_chief:
        unisono.checkpoint.mark_finished(str(flags.evaluate))
print("weights", float(sum(np.abs(w).sum(dtype="float64") for w in model.get_weights())), flush=True)
