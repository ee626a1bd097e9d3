"""`make demo`: a CNN on scikit-learn's handwritten digits, over two virtual devices.

    python examples/demo_digits.py [--epochs 20]

Shows Keras' progress bar, the accuracy on digits that were held out, images per second, and saves a
picture of some predictions and of the training: demo_output/digits.png.

Needs scikit-learn and Matplotlib (`pip install scikit-learn matplotlib`).
"""

import argparse
import sys
import time
from pathlib import Path

import unisono  # before Keras, so that it runs on JAX
import keras
import numpy as np

from _digits import load

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
EPOCHS = parser.parse_args().epochs
BATCH = 50  # need not divide by anything

keras.utils.set_random_seed(0)
strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
print(f"Training on {strategy.num_replicas_in_sync} replicas: {strategy}")

(x_train, y_train), (x_test, y_test) = load()
x_train, x_test = (x[..., None].astype("float32") / 255 for x in (x_train, x_test))

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.Adam(2e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


class Clock(keras.callbacks.Callback):
    """Seconds of every epoch."""

    def on_train_begin(self, logs=None):
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self.start)


clock = Clock()
history = model.fit(
    x_train, y_train, batch_size=BATCH, epochs=EPOCHS, validation_data=(x_test, y_test), callbacks=[clock]
).history

loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
predicted = model.predict(x_test, verbose=0).argmax(-1)
rate = len(x_train) / np.median(clock.seconds[1:])
print(f"\nAccuracy on {len(x_test)} held-out digits: {accuracy:.4f}")
print(f"{rate:,.0f} images per second, validation included")


def picture(path):
    """Predictions, wrong ones first, and the training curve."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    wrong = np.flatnonzero(predicted != y_test)
    right = np.flatnonzero(predicted == y_test)
    shown = np.concatenate([wrong[:8], right])[:24]
    figure = plt.figure(figsize=(11, 5), layout="constrained")
    left, side = figure.subfigures(1, 2, squeeze=False, width_ratios=[3, 2])[0]
    left.suptitle("Held-out digits: predicted (true where it differs)")
    for axis, i in zip(left.subplots(4, 6).flat, shown, strict=True):
        is_right = predicted[i] == y_test[i]
        axis.imshow(x_test[i, ..., 0], cmap="gray_r")
        axis.set_title(
            f"{predicted[i]}" if is_right else f"{predicted[i]} ({y_test[i]})",
            color="black" if is_right else "crimson",
            fontsize=11,
        )
        axis.axis("off")
    curve = side.subplots()
    epochs = range(1, EPOCHS + 1)
    curve.plot(epochs, history["accuracy"], label="training")
    curve.plot(epochs, history["val_accuracy"], label="held out")
    curve.axhline(0.97, color="gray", linewidth=0.8, linestyle="--")
    curve.set(xlabel="epoch", ylabel="accuracy", title=f"{accuracy:.1%} on held-out digits", ylim=(0.5, 1.01))
    curve.xaxis.get_major_locator().set_params(integer=True)
    curve.legend(loc="lower right")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


output = Path("demo_output/digits.png")
picture(output)
print(f"Picture: {output}")
sys.exit(0 if accuracy > 0.97 else "The accuracy should be above 0.97.")
