"""Train with backups in an object store, and be killed or stopped in the middle of an upload.

    object_store.py DIRECTORY RESULT [SIGNAL]

With SIGNAL, the third upload sends it to this process, when the data are in the store and not the manifest.
"""

import json
import logging
import os
import signal
import sys

import keras
import numpy as np

import unisono
from unisono._system._object_store import StorePath
from unisono.callbacks import BackupAndRestore
from unisono.checkpoint import Checkpoint


def interrupt(number):
    upload = StorePath.upload

    def uploaded(path, file):
        upload(path, file)
        if "/backup-3/" in str(path) and path.name == "facts.json":
            os.kill(os.getpid(), number)

    StorePath.upload = uploaded


def main(directory, result, number=None):
    logging.basicConfig(level=logging.WARNING)
    if number:
        interrupt(getattr(signal, number))
    keras.utils.set_random_seed(1)
    in_cluster = "TF_CONFIG" in os.environ
    strategy = unisono.MultiWorkerMirroredStrategy() if in_cluster else unisono.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x = np.arange(120, dtype="float32").reshape(40, 3) / 120
    backup = BackupAndRestore(f"{directory}/backup", 2, delete_checkpoint=False, asynchronous=False)
    model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0, callbacks=[backup])
    # The first worker writes, and all of them read.
    checkpoint = Checkpoint(model=model)
    weights = model.get_weights()
    path = checkpoint.save(f"{directory}/end")
    model.set_weights([w * 0 for w in weights])
    checkpoint.restore(path)
    assert all((a == b).all() for a, b in zip(model.get_weights(), weights, strict=True))
    with open(result, "w") as file:
        json.dump({"weights": [w.tolist() for w in weights], "saved": backup.saved}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
