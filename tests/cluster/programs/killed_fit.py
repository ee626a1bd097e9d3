"""Train with backups, and be killed: one run for each line of standard input.

A line is JSON: `{"backup": dir or null, "result": file, "data": kind, "replicas": n, "kill_at": step or 0}`,
and `"ahead": n` for callbacks that need not see single batches, so that n steps run in one program.
Each run is a process of its own, forked after the imports and before JAX starts, which saves
seconds for each and changes nothing else: it is killed by a real SIGKILL. A line on standard
output says how it ended.
"""

import hashlib
import json
import os
import signal
import sys

import jax
import keras
import numpy as np
from orbax.checkpoint import v1  # noqa: F401 (so that the forked processes need not import it)
from sklearn.datasets import load_digits

import unisono
from unisono.callbacks import BackupAndRestore
from unisono.training.groups import _group_size, _multi_step

EPOCHS, BATCH, ROWS = 4, 48, 500
L = keras.layers


def model_of(replicas):
    strategy = unisono.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                L.Dense(24, activation="relu"),
                L.Dropout(0.3),
                L.BatchNormalization(),
                L.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    return model


class Seen(keras.callbacks.Callback):
    """What a user's callback hears, and what it remembers."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def on_epoch_begin(self, epoch, logs=None):
        self.heard.append(["epoch", epoch])

    def on_train_batch_end(self, batch, logs=None):
        self.heard.append([batch, float(logs["loss"]).hex()])


#: The most steps in one program.
STEPS = _multi_step.MOST_STEPS


class SeenEpochs(keras.callbacks.Callback):
    """What a user's callback hears that does not look at batches."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def on_epoch_end(self, epoch, logs=None):
        self.heard.append([epoch, float(logs["loss"]).hex()])


class Kill(keras.callbacks.Callback):
    """The end, after so many batches of this process."""

    def __init__(self, after, looks):
        super().__init__()
        self._left = after
        self.async_safe = not looks

    def get_state(self):
        return None

    def set_state(self, state):
        """A new process, a new life."""

    def on_train_batch_end(self, batch, logs=None):
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)


def data_of(kind):
    digits = load_digits()
    x, y = (digits.data[:ROWS] / 16).astype("f4"), digits.target[:ROWS].astype("i4")
    slices = unisono.data.Dataset.from_tensor_slices((x, y))

    def forever():
        while True:
            for i in range(0, ROWS, BATCH):
                yield x[i : i + BATCH], y[i : i + BATCH]

    return {
        "arrays": lambda: {"x": x, "y": y, "batch_size": BATCH},
        "dataset": lambda: {"x": slices.shuffle(200, seed=1).batch(BATCH).prefetch(2)},
        "endless": lambda: {"x": slices.shuffle(200, seed=1).batch(BATCH).repeat(), "steps_per_epoch": 9},
        "unknown size": lambda: {"x": slices.filter(lambda x, y: y < 9).shuffle(99, seed=1).batch(BATCH)},
        "generator": lambda: {"x": forever(), "steps_per_epoch": 9},
    }[kind]()


def train(run):
    keras.utils.set_random_seed(3)
    model = model_of(run["replicas"])
    ahead = run.get("ahead", 0)
    if ahead:
        _group_size._FIRST = ahead
    # Steps may run ahead of callbacks that look at batches, too; without, each is a program of its own.
    _multi_step.MOST_STEPS = STEPS if ahead else 1
    seen = SeenEpochs() if ahead else Seen()
    callbacks = [
        keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.3),
        seen,
        Kill(run["kill_at"], looks=not ahead),
    ]
    if run["backup"]:
        callbacks.append(
            BackupAndRestore(run["backup"], run.get("every", 2), asynchronous=run.get("beside", True))
        )
    model.make_train_function()
    function = model.train_function
    history = model.fit(**data_of(run["data"]), epochs=EPOCHS, verbose=0, callbacks=callbacks)
    together = [key for key in function._programs if key.slots > 1]
    assert bool(together) == bool(ahead), function._programs
    state = [*model.get_weights(), *[v.numpy() for v in model.optimizer.variables]]
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(v).tobytes() for v in state))
    result = {"state": digest.hexdigest(), "history": history.history, "heard": seen.heard}
    with open(run["result"], "w") as file:
        json.dump(result, file)


def main():
    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                train(json.loads(line))
                sys.stderr.flush()
                os._exit(0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    main()
