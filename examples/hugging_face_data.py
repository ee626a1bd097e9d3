"""A Hugging Face dataset in `fit`, and batch by batch in a loop.

python examples/hugging_face_data.py [--epochs 10]

Needs scikit-learn and datasets (`pip install scikit-learn datasets`); 20 s on two cores.
The dataset is made here, of scikit-learn's digits. Where it can be downloaded, the one that
`datasets.load_dataset("mnist")` returns has the same two columns.
"""

import argparse

import unisono  # before Keras, so that it runs on JAX
import datasets
import keras

from _digits import devices, load

datasets.disable_progress_bars()
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
options = parser.parse_args()

keras.utils.set_random_seed(1)
strategy = unisono.MirroredStrategy(devices())


def rows(images, labels):
    """A dataset of rows, whose columns are read as NumPy arrays."""
    return datasets.Dataset.from_dict({"image": images, "label": labels}).with_format("numpy")


def batches(data, size=64):
    """Batches `(x, y)`: Hugging Face has names for columns, and `fit` wants an input and a target."""
    # `iter` reads a batch at once. `Dataset.from_source(data)` has rows, which may be shuffled here.
    made = unisono.data.Dataset.from_generator(lambda: data.iter(size))
    made = made.assert_cardinality(-(-len(data) // size))  # so that the number of batches is known
    return made.map(lambda batch: (batch["image"].reshape(-1, 64) / 255.0, batch["label"]))


train, test = (rows(*part) for part in load())
print(train)

with strategy.scope():
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])

# Hugging Face shuffles, and reads the rows in that order in each epoch.
model.fit(batches(train.shuffle(seed=1)), validation_data=batches(test), epochs=options.epochs, verbose=2)


@unisono.function
def right(inputs):
    """How many predictions of a global batch are right."""

    def count(images, labels):
        found = keras.ops.argmax(model(images, training=False), axis=-1)
        return keras.ops.sum(keras.ops.cast(found == keras.ops.cast(labels, found.dtype), "int32"))

    return strategy.reduce("sum", strategy.run(count, args=inputs), axis=None)


# The same batches in a loop. `filter` is Hugging Face's, too.
for digit in (0, 8):
    some = test.filter(lambda label, digit=digit: label == digit, input_columns="label")
    found = sum(int(right(batch)) for batch in strategy.distribute_dataset(batches(some)))
    print(f"digit {digit}: {found} of {len(some)} are right")
