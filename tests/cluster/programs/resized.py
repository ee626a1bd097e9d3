"""Train with backups on any number of workers: `resized.py FOLDER RESULT END`.

END is after how many steps this process is killed, 0 for never; or `elastic`: under `unisono launch`, with
weights in parts, worker 1 goes with its machine in the middle of a backup, and later there is room for it.
"""

import json
import os
import signal
import sys
from pathlib import Path

import unisono

folder, result, end = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
layout = "fully_sharded" if end == "elastic" else "mirrored"
strategy = unisono.MultiWorkerMirroredStrategy(state_layout=layout)

import keras
import numpy as np

from unisono.checkpoint import _safetensors
from unisono.sharding._shards import ShardedVariableLayout

# What lies in parts here: it is sent when it is read, to each worker.
_safetensors.LARGE = 4096
keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(240, 6)).astype("f4")
dataset = unisono.data.Dataset.from_tensor_slices((x, x.sum(1))).shuffle(100).batch(24).prefetch(2)
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(256), keras.layers.Dense(1)])
    model.compile("adam", "mse")


class Kill(keras.callbacks.Callback):
    left = 0 if end == "elastic" else int(end)

    def on_train_batch_end(self, batch, logs=None):
        Kill.left -= 1
        if not Kill.left:
            os.kill(os.getpid(), signal.SIGKILL)


class Elastic(keras.callbacks.Callback):
    """The first generation loses worker 1, the second is asked to make room for it."""

    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        Elastic.steps += 1
        generation = os.environ["UNISONO_GENERATION"]
        if (generation, strategy.worker_index, Elastic.steps) == ("0", 1, 17):
            die_in_backup()
        if (generation, Elastic.steps) == ("1", 8):
            # The signal writes into a pipe as it arrives.
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            before = signal.set_wakeup_fd(writer)
            make_room(2)
            os.read(reader, 1)
            signal.set_wakeup_fd(before)


def die_in_backup():
    """Be killed in the next backup, which is due one step later, when one variable in parts was gathered."""
    gathered, calls = ShardedVariableLayout.gathered, []

    def watched(self, parts):
        calls.append(self.shape)
        if len(calls) > 1:
            make_room(1)
            os.kill(os.getpid(), signal.SIGKILL)
        return gathered(self, parts)

    ShardedVariableLayout.gathered = watched


def make_room(workers):
    """Say how many workers there is room for, all at once."""
    place = Path(os.environ["UNISONO_FENCE"]).parent
    (place / "aside").write_text(f"{workers}\n")
    (place / "aside").replace(place / "capacity")


if strategy.is_chief:
    print("workers", strategy.num_workers, flush=True)
    print("backups", *sorted(p.name for p in Path(folder).glob("backup-*")), flush=True)
backup = unisono.callbacks.BackupAndRestore(
    folder, save_freq=3, asynchronous=False, save_before_preemption=end == "elastic"
)
acts = Elastic() if end == "elastic" else Kill()
history = model.fit(dataset, epochs=4, verbose=0, callbacks=[acts, backup]).history
if strategy.is_chief:
    weights = [float(np.abs(w).sum()) for w in model.get_weights()]
    result.write_text(json.dumps([history["loss"], weights]))
