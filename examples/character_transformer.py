"""A small transformer that learns to write, character by character, by `fit`.

python examples/character_transformer.py [--epochs 6] [--text FILE]

Needs nothing beyond Unisono; two minutes on two cores. Without `--text` it reads the source of a module of
Python's. It prints the loss of unseen text, beside that of guessing by frequency, and a sample.
"""

import argparse
from pathlib import Path

import unisono  # before Keras, so that it runs on JAX
import keras
import numpy as np

from _digits import devices

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--text", type=Path, help="a file of text")
parser.add_argument("--length", type=int, default=64, help="characters in a row of a batch")
options = parser.parse_args()

keras.utils.set_random_seed(1)
text = (options.text or Path(argparse.__file__)).read_text()
letters = sorted(set(text))
numbers = np.array([letters.index(letter) for letter in text], "int32")
# Windows of text; the target is the same text, one character later.
starts = np.arange(0, len(numbers) - options.length - 1, options.length // 2)
windows = np.stack([numbers[i : i + options.length + 1] for i in starts])
train, unseen = windows[: -len(windows) // 10], windows[-len(windows) // 10 :]


class Positions(keras.layers.Layer):
    """Adds to each character a vector for its place."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, inputs):
        return inputs + self.table


def block(x, width):
    y = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.MultiHeadAttention(4, width // 4)(y, y, use_causal_mask=True)
    y = keras.layers.LayerNormalization()(x)
    y = keras.layers.Dense(4 * width, activation="gelu")(y)
    return x + keras.layers.Dense(width)(y)


strategy = unisono.MirroredStrategy(devices())
with strategy.scope():
    inputs = keras.Input((options.length,), dtype="int32")
    x = Positions()(keras.layers.Embedding(len(letters), 64)(inputs))
    for _ in range(2):
        x = block(x, 64)
    model = keras.Model(inputs, keras.layers.Dense(len(letters))(keras.layers.LayerNormalization()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(2e-3), loss)

model.fit(train[:, :-1], train[:, 1:], batch_size=64, epochs=options.epochs, verbose=2)

share = np.bincount(train[:, 1:].ravel(), minlength=len(letters)) + 1
guess = -np.log(share / share.sum())[unseen[:, 1:]].mean()
found = model.evaluate(unseen[:, :-1], unseen[:, 1:], batch_size=64, verbose=0)
print(f"loss of unseen text: {found:.2f}, by frequency {guess:.2f}")

row = unseen[0, :-1]
for _ in range(80):
    logits = model.predict(row[None, -options.length :], verbose=0)[0, -1]
    likely = np.exp((logits - logits.max()) / 0.5)
    row = np.append(row, np.random.choice(len(letters), p=likely / likely.sum()))
print("sample:", "".join(letters[i] for i in row[options.length :]).replace("\n", " "))
