"""The tutorial's MLP: compile and fit under MirroredStrategy.

python examples/mirrored_fit.py [--mnist] [--epochs 5]

Needs scikit-learn (`pip install scikit-learn`); 15 s on two cores.
"""

import argparse

import jax
import unisono  # before Keras, so that it runs on JAX
import keras

from _digits import devices, load

options = argparse.ArgumentParser()
options.add_argument("--mnist", action="store_true")
options.add_argument("--epochs", type=int, default=30)  # changed: digits are 1,500 images, MNIST 60,000
options = options.parse_args()

keras.utils.set_random_seed(42)

# Create a MirroredStrategy
strategy = unisono.MirroredStrategy(devices())
print(f"Num GPUs Available: {sum(d.platform == 'gpu' for d in jax.devices())}")  # changed: JAX knows
print(f"Number of devices: {strategy.num_replicas_in_sync}")

(x_train, y_train), (x_test, y_test) = load(options.mnist)
x_train, x_test = x_train / 255.0, x_test / 255.0
x_train = x_train.reshape(len(x_train), -1).astype("float32")
x_test = x_test.reshape(len(x_test), -1).astype("float32")

# Create the model, optimizer, and loss function within the strategy's scope
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((x_train.shape[1],)),  # changed: Keras 3 wants an Input
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])

batch_size = 64 * strategy.num_replicas_in_sync  # Scale batch size by number of replicas
Dataset = unisono.data.Dataset  # changed: tf.data's vocabulary without TensorFlow
train_dataset = Dataset.from_tensor_slices((x_train, y_train)).shuffle(10000).batch(batch_size)
test_dataset = Dataset.from_tensor_slices((x_test, y_test)).batch(batch_size)

# Train the model
model.fit(train_dataset, epochs=options.epochs, verbose=2)

# Evaluate the model
eval_loss, eval_accuracy = model.evaluate(test_dataset, verbose=0)
print(f"Evaluation accuracy: {eval_accuracy:.3f}")
