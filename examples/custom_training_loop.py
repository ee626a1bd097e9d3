"""The tutorial's own training loop: a step per replica, a tape, reduce.

python examples/custom_training_loop.py [--mnist] [--epochs 5]

Needs scikit-learn (`pip install scikit-learn`); 15 s on two cores.
"""

import argparse

import unisono  # before Keras, so that it runs on JAX
import keras

from _digits import devices, load

options = argparse.ArgumentParser()
options.add_argument("--mnist", action="store_true")
options.add_argument("--epochs", type=int, default=5)
options.add_argument("--one-device", action="store_true", help="the same loop on one device, to compare")
options = options.parse_args()

keras.utils.set_random_seed(42)

# Create a strategy
if options.one_device:
    strategy = unisono.OneDeviceStrategy("cpu:0")
else:
    strategy = unisono.MirroredStrategy(devices())
print(f"Number of devices: {strategy.num_replicas_in_sync}")

# Prepare the dataset
(x_train, y_train), _ = load(options.mnist)
x_train = x_train.reshape(len(x_train), -1).astype("float32") / 255.0

# Create the dataset and distribute it
batch_size = 64 * 2  # changed: fixed, so that one device can be compared with two
train_dataset = (
    unisono.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(10000, seed=0).batch(batch_size)
)
dist_dataset = strategy.experimental_distribute_dataset(train_dataset)

# Create the model within strategy scope
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((x_train.shape[1],)),  # changed: Keras 3 wants an Input
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(10),
        ]
    )

    # Define loss and optimizer
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.001)

    # Define metrics
    train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")


# Define the training step
def train_step(inputs):
    features, labels = inputs

    with unisono.GradientTape() as tape:
        predictions = model(features, training=True)
        loss = loss_fn(labels, predictions)

    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    train_accuracy.update_state(labels, predictions)
    return loss


# Define the distributed training step
@unisono.function
def distributed_train_step(inputs):
    per_replica_losses = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(unisono.ReduceOp.SUM, per_replica_losses, axis=None)


# Training loop
for epoch in range(options.epochs):
    total_loss = 0.0
    num_batches = 0

    # Reset metrics for each epoch
    train_accuracy.reset_state()  # changed: Keras 3's name

    for step, batch in enumerate(dist_dataset):
        loss = distributed_train_step(batch)
        total_loss += loss
        num_batches += 1

        if step % 100 == 0:
            print(f"Epoch {epoch + 1}, Step {step}, Loss: {loss:.4f}")

    # Print epoch results
    print(f"Epoch {epoch + 1}, Loss: {total_loss / num_batches:.4f}, Accuracy: {train_accuracy.result():.4f}")
