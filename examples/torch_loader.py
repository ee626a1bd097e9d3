"""A `torch.utils.data.DataLoader` in `fit`, and in a loop of one's own. Only the data are torch's.

python examples/torch_loader.py [--epochs 10]

Needs scikit-learn and torch (`pip install scikit-learn torch`); half a minute on two cores.
"""

import argparse

import unisono  # before Keras, so that it runs on JAX
import keras
import torch

from _digits import devices, load

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
options = parser.parse_args()

keras.utils.set_random_seed(1)
strategy = unisono.MirroredStrategy(devices())


class Digits(torch.utils.data.Dataset):
    """Rows `(image, label)`; an image is moved by a pixel at random, where `moves` says so."""

    def __init__(self, data, moves):
        images, labels = data
        self.images = torch.from_numpy(images / 255.0).float()
        self.labels, self.moves = torch.from_numpy(labels), moves

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.moves:
            image = torch.roll(image, int(torch.randint(-1, 2, ())), dims=1)
        return image.reshape(-1), self.labels[index]


# The batch size is that of all replicas together. The loader shuffles, by torch's random numbers: the workers
# of a cluster must draw the same.
torch.manual_seed(1)
train_data, test_data = load()
train = torch.utils.data.DataLoader(Digits(train_data, moves=True), batch_size=64, shuffle=True)
test = torch.utils.data.DataLoader(Digits(test_data, moves=False), batch_size=64)

with strategy.scope():
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
    )
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(1e-3)
    model.compile(optimizer, loss_fn, metrics=["accuracy"])

model.fit(train, validation_data=test, epochs=options.epochs, verbose=2)


def train_step(images, labels):  # runs once for each replica, on its own rows
    with unisono.GradientTape() as tape:
        loss = loss_fn(labels, model(images, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


@unisono.function
def distributed_step(inputs):
    return strategy.reduce("sum", strategy.run(train_step, args=inputs), axis=None)


# Two more epochs, by hand. A loader in `distribute_dataset` gives its batches divided among the replicas.
distributed = strategy.distribute_dataset(train)
for epoch in range(2):
    losses = [float(distributed_step(batch)) for batch in distributed]
    print(f"epoch {epoch + 1} of the loop: loss {sum(losses) / len(losses):.3f}")
print(f"Evaluation accuracy: {model.evaluate(test, verbose=0)[1]:.3f}")
