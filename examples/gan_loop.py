"""A generative adversarial network in a loop of its own: two models, two optimizers, two tapes in a step.

python examples/gan_loop.py [--steps 800]

Needs nothing beyond Unisono; half a minute on two cores. The generator learns a ring of eight clusters in the
plane, which are made on the spot. It prints how far its points lie from the ring, before and after.
"""

import argparse

import unisono  # before Keras, so that it runs on JAX
import keras
import numpy as np

from _digits import devices

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=800)
parser.add_argument("--batch", type=int, default=256, help="for all replicas together")
options = parser.parse_args()

keras.utils.set_random_seed(1)
rng = np.random.default_rng(1)
strategy = unisono.MirroredStrategy(devices())
NOISE = 8


def real(rows):
    """Points of eight clusters on a ring of radius 1."""
    angle = rng.integers(0, 8, rows) * (np.pi / 4)
    points = np.stack([np.cos(angle), np.sin(angle)], axis=1) + rng.normal(0, 0.03, (rows, 2))
    return points.astype("float32")


def noise(rows):
    return rng.normal(size=(rows, NOISE)).astype("float32")


def layers(inputs, outputs):
    hidden = [keras.layers.Dense(64, activation="leaky_relu") for _ in range(2)]
    return keras.Sequential([keras.Input((inputs,)), *hidden, keras.layers.Dense(outputs)])


with strategy.scope():
    generator, discriminator = layers(NOISE, 2), layers(2, 1)
    generator_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5)
    discriminator_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5)
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)


def train_step(points, seeds):  # runs once per replica, on its own rows
    with unisono.GradientTape() as tape:
        judged = discriminator(points, training=True)
        made = discriminator(generator(seeds, training=True), training=True)
        loss = entropy(keras.ops.ones_like(judged), judged) + entropy(keras.ops.zeros_like(made), made)
    gradients = tape.gradient(loss, discriminator.trainable_variables)
    discriminator_optimizer.apply_gradients(zip(gradients, discriminator.trainable_variables))

    # The new discriminator judges.
    with unisono.GradientTape() as tape:
        judged = discriminator(generator(seeds, training=True), training=True)
        generator_loss = entropy(keras.ops.ones_like(judged), judged)
    gradients = tape.gradient(generator_loss, generator.trainable_variables)
    generator_optimizer.apply_gradients(zip(gradients, generator.trainable_variables))
    # A loss of `keras.losses` is the replica's part of that of one device.
    return loss, generator_loss


@unisono.function
def distributed_step(points, seeds):
    losses = strategy.run(train_step, args=(points, seeds))
    return strategy.reduce("SUM", losses, axis=None)


def distance():
    """The mean distance of a thousand made points from the ring."""
    points = generator.predict(noise(1000), batch_size=500, verbose=0)
    return np.abs(np.linalg.norm(points, axis=1) - 1).mean()


batches = ((real(options.batch), noise(options.batch)) for _ in range(options.steps))
print(f"distance from the ring, before: {distance():.2f}")
for number, (points, seeds) in enumerate(strategy.distribute_dataset(batches)):
    loss, generator_loss = distributed_step(points, seeds)
    if number % 200 == 0:
        print(f"step {number}: discriminator {float(loss):.2f}, generator {float(generator_loss):.2f}")
print(f"distance from the ring, after: {distance():.2f}")
