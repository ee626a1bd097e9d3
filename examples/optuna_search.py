"""A search for hyperparameters by Optuna, each trial on all devices of this machine.

python examples/optuna_search.py [--trials 6] [--epochs 5]

Needs scikit-learn and Optuna (`pip install scikit-learn optuna`); a minute on two cores. Trials run one
after the other; trials that fall behind end early. On a cluster of Ray: ray_tune.py.
"""

import argparse

import unisono  # before Keras, so that it runs on JAX
import keras
import optuna

from _digits import devices, load

parser = argparse.ArgumentParser()
parser.add_argument("--trials", type=int, default=6)
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()

(x, y), test = load()
x, test = x.reshape(len(x), -1) / 255.0, (test[0].reshape(-1, 64) / 255.0, test[1])
strategy = unisono.MirroredStrategy(devices())


def objective(trial):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        width = trial.suggest_int("width", 16, 128, log=True)
        layers = [keras.layers.Dense(width, activation="relu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        rate = trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])

    def report(epoch, logs):
        trial.report(logs["val_accuracy"], epoch)
        model.stop_training = trial.should_prune()

    told = keras.callbacks.LambdaCallback(on_epoch_end=report)
    history = model.fit(
        x, y, batch_size=64, epochs=options.epochs, validation_data=test, callbacks=[told], verbose=0
    )
    return max(history.history["val_accuracy"])


optuna.logging.set_verbosity(optuna.logging.WARNING)
search = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=1))
search.optimize(objective, n_trials=options.trials)
print(f"trials: {len(search.trials)}, best accuracy {search.best_value:.2f} with {search.best_params}")
