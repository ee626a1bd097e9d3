"""The tutorial's MultiWorkerMirroredStrategy, written out: `fit`, checkpoints, and a custom loop.

unisono launch -n 2 examples/multi_worker_custom_loop.py [--mnist] [--epochs 10]

By hand, in two shells (or on two machines, with their names), the second with "index": 1:

TF_CONFIG='{"cluster": {"worker": ["127.0.0.1:23456", "127.0.0.1:23457"]},
            "task": {"type": "worker", "index": 0}}' python examples/multi_worker_custom_loop.py

Without TF_CONFIG it runs in one process, with the same numbers.

Needs scikit-learn (`pip install scikit-learn`).
"""

import argparse

import unisono  # before Keras, so that it runs on JAX
import keras
import numpy as np

from _digits import load

options = argparse.ArgumentParser()
options.add_argument("--mnist", action="store_true")
options.add_argument("--epochs", type=int, default=10)
options = options.parse_args()

# Create the strategy
# changed: TF_CONFIG comes from the shell or the launcher, so that all workers run one program
strategy = unisono.MultiWorkerMirroredStrategy()
print(f"Worker {strategy.worker_index} of {strategy.num_workers}")

# Every worker starts from the first one's weights anyway; the seed makes runs comparable.
keras.utils.set_random_seed(42)

(x_train, y_train), (x_test, y_test) = load(options.mnist)
x_train, x_test = (x.reshape(len(x), -1).astype("float32") / 255.0 for x in (x_train, x_test))

# Every worker makes the same global batches, and computes its part of each
Dataset = unisono.data.Dataset
batch_size = 128
train_dataset = Dataset.from_tensor_slices((x_train, y_train)).shuffle(10000, seed=0).batch(batch_size)
test_dataset = Dataset.from_tensor_slices((x_test, y_test)).batch(batch_size)

# The rest follows the same pattern
with strategy.scope():
    # Create and compile model
    model = keras.Sequential(
        [
            keras.Input((x_train.shape[1],)),  # changed: Keras 3 wants an Input
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])

# Training and evaluation
callbacks = [
    keras.callbacks.ModelCheckpoint(  # the chief writes it, once
        filepath="checkpoint.weights.h5",  # changed: Keras 3's ending
        save_weights_only=True,
        verbose=1,
    )
]
model.fit(train_dataset, epochs=options.epochs, callbacks=callbacks, verbose=2)
loss, accuracy = model.evaluate(test_dataset, verbose=0)

# Exercise 2 of the tutorial: a custom loop on several workers
with strategy.scope():
    loss_fn = keras.losses.SparseCategoricalCrossentropy()
    optimizer = keras.optimizers.Adam(1e-4)


def train_step(inputs):
    features, labels = inputs
    with unisono.GradientTape() as tape:
        loss = loss_fn(labels, model(features, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


@unisono.function
def distributed_train_step(inputs):
    return strategy.reduce(unisono.ReduceOp.SUM, strategy.run(train_step, args=(inputs,)), axis=None)


losses = [float(distributed_train_step(batch)) for batch in strategy.distribute_dataset(train_dataset)]

if strategy.is_chief:
    print(f"Evaluation loss: {loss:.4f}, accuracy: {accuracy:.4f}")
    print(f"Loop: {len(losses)} steps, mean loss {np.mean(losses):.4f}")
