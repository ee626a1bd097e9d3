"""Ray Tune chooses a learning rate; each trial trains on two workers of Ray.

    pip install 'unisono[ray]'
    python examples/ray_tune.py

It uses the cluster that RAY_ADDRESS names, or starts Ray on this machine. A trial takes three of Ray's
CPUs: one for itself, one for each worker.

Needs the extra `ray`.
"""

import os

import ray
from ray import tune

import unisono


def train(learning_rate):
    """Run on each worker of a trial."""
    strategy = unisono.MultiWorkerMirroredStrategy()

    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(learning_rate), "mse")
    return model.fit(x, x.sum(1), epochs=3, batch_size=32, verbose=0).history["loss"]


def trial(config):
    """Run one trial: a trainer of its own, whose losses are reported."""
    losses = unisono.ray.Trainer(train, workers=2, args=(config["learning_rate"],)).fit()
    for loss in losses:
        tune.report({"loss": loss})


def main():
    # Of a Ray that is started here; they may be more than the machine has.
    ray.init(num_cpus=None if os.environ.get("RAY_ADDRESS") else 3)
    # One trial after the other: trials that hold all CPUs would wait for those of their workers.
    tuner = tune.Tuner(
        trial,
        param_space={"learning_rate": tune.grid_search([0.001, 0.1])},
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=1),
    )
    best = tuner.fit().get_best_result()
    config, metrics = best.config or {}, best.metrics or {}
    print(f"Best: learning rate {config['learning_rate']}, loss {metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
