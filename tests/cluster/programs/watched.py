"""Workers that train until worker 0 finds the file `stop` in a folder."""

import json
import os
import sys
import time
from pathlib import Path

import unisono

strategy = unisono.MultiWorkerMirroredStrategy()

import keras
import numpy as np

folder = Path(sys.argv[1])
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


class Wait(keras.callbacks.Callback):
    """Slow steps until the test has seen them."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)

    def on_epoch_end(self, epoch, logs=None):
        last = folder / "last"
        if index == 0 and (folder / "stop").exists() and not last.exists():
            # Of both workers, which wait for each other in each step.
            last.write_text(str(epoch + 2))
        self.model.stop_training = last.exists() and epoch >= int(last.read_text() or epoch + 1)


keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
x = np.ones((64, 4), "float32")
model.fit(x, x, epochs=1000, batch_size=8, verbose=0, callbacks=[Wait()])
