"""A search for hyperparameters by KerasTuner, each trial on all devices of this machine.

python examples/keras_tuner_search.py [--trials 6] [--epochs 5]

Needs scikit-learn and KerasTuner (`pip install scikit-learn keras-tuner`); a minute on two cores. The same
by Optuna: optuna_search.py.
"""

import argparse
import tempfile

import unisono  # before Keras, so that it runs on JAX
import keras
import keras_tuner

from _digits import devices, load

parser = argparse.ArgumentParser()
parser.add_argument("--trials", type=int, default=6)
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()

(x, y), test = load()
x, test = x.reshape(len(x), -1) / 255.0, (test[0].reshape(-1, 64) / 255.0, test[1])
# The tuner's own `distribution_strategy` is for TensorFlow's strategies: leave it out, and enter the scope.
strategy = unisono.MirroredStrategy(devices())


def build(choices):
    with strategy.scope():
        width = choices.Int("width", 16, 128, sampling="log")
        layers = [keras.layers.Dense(width, activation="relu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        rate = choices.Float("learning_rate", 1e-4, 1e-1, sampling="log")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


with tempfile.TemporaryDirectory() as folder:
    tuner = keras_tuner.BayesianOptimization(
        build, "val_accuracy", max_trials=options.trials, seed=1, directory=folder
    )
    tuner.search(x, y, batch_size=64, epochs=options.epochs, validation_data=test, verbose=0)
    trials = tuner.oracle.get_best_trials(options.trials)
    best = tuner.get_best_models()[0]
print(f"trials: {len(trials)}, best accuracy {trials[0].score:.2f} with {trials[0].hyperparameters.values}")
print(f"of the best model, loaded: {best.evaluate(*test, verbose=0)[1]:.2f}")
