"""A `fit` of replicas that train apart, which is preempted while something is sent, or resumes."""

import json
import signal
import sys

import unisono

folder, how, result, size = sys.argv[1:]


def outer():
    return keras.optimizers.SGD(0.7, momentum=0.9)


cut = {".*hidden/kernel": (None, "model"), ".*hidden/bias": ("model",), ".*norm/.*": ("model",)}
strategy = unisono.MultiWorkerMirroredStrategy(
    sync=unisono.LocalUpdates(5, outer, fragments=2, overlap=2),
    devices_per_replica=int(size),
    layout_map=cut if int(size) > 1 else None,
)

import keras
import numpy as np

from unisono.callbacks import BackupAndRestore

keras.utils.set_random_seed(0)
with strategy.scope():
    layers = [keras.layers.Dense(14, activation="relu", name="hidden")]
    layers += [keras.layers.BatchNormalization(name="norm")]
    model = keras.Sequential([keras.Input((7,)), *layers, keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])


class Preempts(keras.callbacks.Callback):
    """Ends the first run after its fourth step."""

    def on_train_batch_end(self, batch, logs=None):
        if how == "preempted" and batch == 3:
            signal.raise_signal(signal.SIGTERM)


generator = np.random.default_rng(0)
x, y = generator.normal(size=(108, 7)).astype("float32"), generator.integers(0, 3, 108)
callbacks = [Preempts()]
if how != "whole":
    callbacks.append(BackupAndRestore(folder, save_before_preemption=True))
history = model.fit(x, y, batch_size=12, epochs=2, verbose=0, shuffle=False, callbacks=callbacks).history
values = [np.asarray(v).tolist() for v in model.variables]
if strategy.process_group.is_chief:
    with open(result, "w") as file:
        json.dump([history, values], file)
