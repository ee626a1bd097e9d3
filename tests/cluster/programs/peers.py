"""Two workers, of which one is stopped, or both are asked to end: `peers.py FOLDER MODE`.

Mode `stop`: train to the end, then once more, in which worker 1 is stopped; `end`: both get SIGTERM;
`again`: the same as `end` when it has ended.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import unisono

folder, mode = Path(sys.argv[1]), sys.argv[2]
# Short only where a worker is silent: on a busy machine one compiles for seconds while the other waits.
timeout = 10.0 if mode == "stop" else 600.0
strategy = unisono.MultiWorkerMirroredStrategy(
    communication_options=unisono.CommunicationOptions(timeout_seconds=timeout)
)

import keras
import numpy as np

WORKER = strategy.worker_index
STEPS = 64

keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(STEPS * 8, 6)).astype("f4")
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("adam", "mse")


class Act(keras.callbacks.Callback):
    """Worker 1 is stopped after step 5; or both get SIGTERM, worker 1 two steps later."""

    def on_train_batch_end(self, batch, logs=None):
        (folder / f"step-{WORKER}").write_text(str(batch))
        if mode == "stop" and WORKER == 1 and batch == 5:
            os.kill(os.getpid(), signal.SIGSTOP)
        if mode == "end" and batch == 9 + 2 * WORKER:
            os.kill(os.getpid(), signal.SIGTERM)

    def get_state(self):
        return None

    def set_state(self, state):
        """Nothing is kept."""


def train(name, *callbacks):
    model.fit(x, x.sum(1), batch_size=8, shuffle=True, verbose=0, callbacks=list(callbacks))
    state = b"".join(np.ascontiguousarray(w).tobytes() for w in model.get_weights())
    (folder / f"weights-{WORKER}-{name}").write_text(hashlib.sha256(state).hexdigest())


if mode == "stop":
    train("plain")
    train("stop", Act())
else:
    backup = unisono.callbacks.BackupAndRestore(folder / "backup", save_freq=0, save_before_preemption=True)
    train(mode, Act(), backup)
