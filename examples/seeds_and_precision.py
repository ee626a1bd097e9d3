"""Seeds, mixed precision, a model compiled in the wrong scope, and the TPU snippet of the tutorial.

python examples/seeds_and_precision.py

Needs scikit-learn (`pip install scikit-learn`); half a minute on two cores.
"""

import random

import unisono  # before Keras, so that it runs on JAX
import keras
import numpy as np

from _digits import load

(x, y), _ = load()
x = x.reshape(len(x), -1).astype("float32") / 255


def set_seeds(seed=42):
    keras.utils.set_random_seed(seed)  # changed: tf.random.set_seed; this seeds all three
    np.random.seed(seed)
    random.seed(seed)


def create_model():
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def trained(strategy):
    with strategy.scope():
        model = create_model()
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model.fit(x, y, epochs=2, batch_size=64, verbose=0), model


# Different results across runs: set seeds before creating the strategy
losses = []
for _ in range(2):
    set_seeds()
    strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    losses.append(trained(strategy)[0].history["loss"])
print("Two runs with one seed are equal:", losses[0] == losses[1])

# Out of memory: enable mixed precision, then create the strategy and model as usual
policy = keras.mixed_precision.DTypePolicy("mixed_float16")  # changed: Keras 3's name for Policy
keras.mixed_precision.set_global_policy(policy)
history, model = trained(unisono.MirroredStrategy(["cpu:0", "cpu:1"]))
print(f"Mixed precision: {type(model.optimizer).__name__}, loss {history.history['loss'][-1]:.2f}")
keras.mixed_precision.set_global_policy("float32")

# Wrong: this will create variables outside the strategy scope
model = create_model()
try:
    with strategy.scope():
        model.compile("adam", "sparse_categorical_crossentropy")  # Too late!
except ValueError as error:
    print("Too late!", error)

# Only on a TPU runtime; without one, CPU devices stand in for its cores
resolver = unisono.cluster_resolver.TPUClusterResolver(devices=["cpu:0", "cpu:1"])
unisono.tpu.experimental_connect_to_cluster(resolver)
unisono.tpu.initialize_tpu_system(resolver)
strategy = unisono.TPUStrategy(resolver)
print(f"Number of TPU devices: {strategy.num_replicas_in_sync}")
