"""Fine-tuning by low-rank adapters (LoRA): a small fraction of the weights learns new data.

python examples/lora.py [--epochs 12] [--rank 4]

Needs scikit-learn (`pip install scikit-learn`); half a minute on two cores. A classifier learns the digits
0 to 4. With `Dense.enable_lora` (KerasHub: `backbone.enable_lora`) it then learns 5 to 9, and its own weights
stay as they are. It prints how many weights learn, and the accuracy before and after.
"""

import argparse

import unisono  # before Keras, so that it runs on JAX
import keras
import numpy as np

from _digits import devices, load

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--rank", type=int, default=4)
options = parser.parse_args()

keras.utils.set_random_seed(1)
(x, y), (x_test, y_test) = load()
x, x_test = (a.reshape(len(a), -1).astype("float32") / 255 for a in (x, x_test))

strategy = unisono.MirroredStrategy(devices())


def compile_model():
    model.compile(
        keras.optimizers.Adam(3e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


with strategy.scope():
    hidden = [keras.layers.Dense(256, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((x.shape[1],)), *hidden, keras.layers.Dense(5)])
    compile_model()
model.fit(x[y < 5], y[y < 5], batch_size=64, epochs=options.epochs, verbose=0)

# The weights that learn are other ones now: compile again, in the scope that holds them.
kernels = [np.asarray(layer._kernel) for layer in hidden]
with strategy.scope():
    for layer in hidden:
        layer.enable_lora(options.rank)
        layer.bias.trainable = False
    compile_model()
learn, every = (sum(int(np.prod(w.shape)) for w in ws) for ws in (model.trainable_weights, model.weights))
print(f"weights that learn: {learn} of {every}")

new, new_test = y >= 5, y_test >= 5
before = model.evaluate(x_test[new_test], y_test[new_test] - 5, verbose=0)[1]
model.fit(x[new], y[new] - 5, batch_size=64, epochs=options.epochs, verbose=0)
after = model.evaluate(x_test[new_test], y_test[new_test] - 5, verbose=0)[1]
print(f"accuracy on the new digits: {before:.2f} before, {after:.2f} after")
same = all(np.array_equal(np.asarray(layer._kernel), kernel) for layer, kernel in zip(hidden, kernels))
print(f"the adapted kernels are as they were: {same}")
