"""The overview of tf.distribute: strategies by name, and a CNN in the scope of one.

python examples/strategies_overview.py

Needs scikit-learn (`pip install scikit-learn`).
"""

import unisono  # before Keras, so that it runs on JAX
import keras

from _digits import load

# changed: on a machine without GPUs, name virtual CPU devices; `MirroredStrategy()` takes every GPU.
strategy = unisono.MirroredStrategy(devices=["/cpu:0", "/cpu:1"])

with strategy.scope():
    classifier = keras.Sequential(
        [
            keras.Input((8, 8, 1)),  # changed: Keras 3 wants an Input, and digits are 8 x 8
            keras.layers.Conv2D(32, (3, 3), activation="relu"),
            keras.layers.Conv2D(64, (3, 3), activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    classifier.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

(x, y), (x_test, y_test) = load()
classifier.fit(x[..., None] / 255.0, y, epochs=3, batch_size=64, verbose=2)
loss, accuracy = classifier.evaluate(x_test[..., None] / 255.0, y_test, verbose=0)
print(f"MirroredStrategy: accuracy {accuracy:.3f}")

# The state once, in one place; the same code otherwise.
central = unisono.experimental.CentralStorageStrategy(["/cpu:0", "/cpu:1"])
with central.scope():
    small = keras.Sequential([keras.Input((8, 8)), keras.layers.Flatten(), keras.layers.Dense(10, "softmax")])
    small.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
small.fit(x / 255.0, y, epochs=3, batch_size=64, verbose=0)
print(f"CentralStorageStrategy: accuracy {small.evaluate(x_test / 255.0, y_test, verbose=0)[1]:.3f}")
