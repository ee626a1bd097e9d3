"""Two workers train, and once more until worker 1 is stopped: `peers.py FOLDER`."""

import os
import signal
import sys
from pathlib import Path

import unisono

strategy = unisono.MultiWorkerMirroredStrategy(
    communication_options=unisono.CommunicationOptions(timeout_seconds=10.0)
)

import keras
import numpy as np

folder = Path(sys.argv[1])
WORKER = strategy.worker_index

x = np.random.default_rng(0).normal(size=(64, 6)).astype("f4")
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("adam", "mse")


class Stop(keras.callbacks.Callback):
    """Worker 1 is stopped after step 5."""

    def on_train_batch_end(self, batch, logs=None):
        (folder / f"step-{WORKER}").write_text(str(batch))
        if WORKER == 1 and batch == 5:
            os.kill(os.getpid(), signal.SIGSTOP)


for callbacks in ([], [Stop()]):
    model.fit(x, x.sum(1), batch_size=1, verbose=0, callbacks=callbacks)
    (folder / f"trained-{WORKER}-{len(callbacks)}").touch()
