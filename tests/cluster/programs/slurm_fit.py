"""Train under Slurm with backups; in the generations before that of the argument, wait in a step.

Worker 0 waits, after a line on standard output, until SIGTERM. Without `unisono run` there is no waiting.
"""

import hashlib
import os
import signal
import sys

import unisono

strategy = unisono.MultiWorkerMirroredStrategy()

import keras
import numpy as np

from unisono.callbacks import BackupAndRestore

backup, waits_before = sys.argv[1], int(sys.argv[2])
#: Of this process: a callback's own number would be restored.
steps = []
generation = int(os.environ.get("UNISONO_GENERATION", "99"))


class Wait(keras.callbacks.Callback):
    """Stay in the fourth step of this process until the signal has come."""

    def on_train_batch_end(self, batch, logs=None):
        steps.append(batch)
        if len(steps) != 4 or generation >= waits_before or strategy.cluster_resolver.task_id:
            return
        # The signal writes into a pipe as it arrives, whichever thread of the process it meets.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer)
        print("waits in generation", generation, flush=True)
        os.read(reader, 1)
        signal.set_wakeup_fd(before)


keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(2)]
    )
    model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(240, 8)).astype("float32")
data = unisono.data.Dataset.from_tensor_slices((x, x[:, :2])).shuffle(100, seed=1).batch(40)
model.fit(
    data, epochs=4, verbose=0, callbacks=[Wait(), BackupAndRestore(backup, 2, save_before_preemption=True)]
)
state = [*model.get_weights(), *[v.numpy() for v in model.optimizer.variables]]
digest = hashlib.sha256(b"".join(np.ascontiguousarray(v).tobytes() for v in state)).hexdigest()
print("state", digest, "generation", generation, flush=True)
