"""What pods run: `fit` on workers, or with parameter servers; the first argument says which."""

import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

import unisono

servers, folder = sys.argv[1] == "ps", Path(sys.argv[2])
strategy = unisono.ParameterServerStrategy() if servers else unisono.MultiWorkerMirroredStrategy()
if "probed" in sys.argv:
    deadline = time.monotonic() + 120
    while not (folder / "probed").exists():
        assert time.monotonic() < deadline, "the test has not seen that this pod is ready"
        time.sleep(0.02)
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")


class KilledOnce(keras.callbacks.Callback):
    """The second worker is killed in its second epoch, the first time."""

    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
        mark = folder / "killed"
        if "killed" in sys.argv and (strategy.cluster_resolver.task_id, epoch, mark.exists()) == (
            1,
            1,
            False,
        ):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


backup = [] if servers else [unisono.callbacks.BackupAndRestore(folder / "backup", save_freq="epoch")]
history = model.fit(x, x.sum(axis=1), batch_size=32, epochs=3, verbose=0, callbacks=[KilledOnce(), *backup])
print("replicas", strategy.num_replicas_in_sync, "epochs", history.epoch, flush=True)
