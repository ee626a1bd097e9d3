"""Two workers, each with a store of MLflow of its own: of `autolog`, and of MLflow's callback."""

import os
import sys
from pathlib import Path

os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"

# Before the strategy, which keeps it silent on all workers but the chief.
import mlflow

import unisono

strategy = unisono.MultiWorkerMirroredStrategy()

import keras
import numpy as np

x = np.random.default_rng(0).normal(size=(16, 2)).astype("float32")


def fitted(name, callbacks=()):
    """Train with a store that is this worker's; return the losses."""
    mlflow.set_tracking_uri((Path(sys.argv[1]) / f"{name}-{strategy.worker_index}").as_uri())
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    made = [each() for each in callbacks]
    return model.fit(x, x[:, :1], epochs=2, batch_size=8, verbose=0, callbacks=made).history["loss"]


def on_the_chief():
    return mlflow.keras.MlflowCallback(mlflow.start_run() if strategy.is_chief else None)


alone = fitted("callback", [on_the_chief])
if strategy.is_chief:
    mlflow.end_run()
mlflow.keras.autolog(log_models=False)
print("same losses", fitted("autolog") == alone, flush=True)
