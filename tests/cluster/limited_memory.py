"""Trains a model in a process that may hold so many bytes; `test_larger_than_a_device.py` starts it.

python limited_memory.py LAYOUT BYTES [FOLDER EPOCHS]: in one process, or in those of TF_CONFIG; with backups
in FOLDER, from where it goes on. LAYOUT is a `state_layout`, or "devices_per_replica" for one replica of two.
"""

import ctypes
import re
import resource
import sys
from pathlib import Path

import keras
import numpy as np

import unisono

#: `M_MMAP_THRESHOLD` of glibc.
MMAP_THRESHOLD = -3

#: 196 MiB of weights, of which a layer has 12.
WIDTH, LAYERS = 1792, 16


def data_bytes():
    """What counts for RLIMIT_DATA: private memory that may be written."""
    return 1024 * int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def main():
    layout, limit = sys.argv[1], int(sys.argv[2])
    # Large arrays that are freed go back to the system: holes between others would count for the bound.
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 20)
    if layout == "devices_per_replica":
        strategy = unisono.MultiWorkerMirroredStrategy(devices_per_replica=2)
    else:
        strategy = unisono.MultiWorkerMirroredStrategy(state_layout=layout)
    x = np.random.default_rng(0).normal(size=(8, WIDTH)).astype("float32")
    # What the process itself needs, and its compiler, in all layouts.
    with strategy.scope():
        warm = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(1)])
        warm.compile("adam", "mse")
    warm.fit(x[:, :64], np.ones((8, 1)), batch_size=8, verbose=0)
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + limit, data_bytes() + limit))
    keras.utils.set_random_seed(0)
    with strategy.scope():
        hidden = [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *hidden, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(1e-5), "mse")
    folder, epochs = sys.argv[3:] or ("", 4)
    backups = [unisono.callbacks.BackupAndRestore(folder, delete_checkpoint=False)] if folder else []
    options = {"batch_size": 8, "epochs": int(epochs), "verbose": 0, "callbacks": backups}
    losses = model.fit(x, np.ones((8, 1)), **options).history["loss"]
    print("losses", *losses, flush=True)


if __name__ == "__main__":
    main()
