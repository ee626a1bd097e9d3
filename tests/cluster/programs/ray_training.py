"""A training on two workers, by whatever has started them."""

import time
from pathlib import Path


def trained(folder, stays=False, backup=None, callbacks=()):
    """Train, and return the weights; each step appends the generation to a file of its worker.

    Args:
        folder: that all workers share.
        stays: whether worker 1 of the first generation stays in its ninth step, until it is ended.
        backup: the folder of the backup; None for one in `folder`.
    """
    import os

    import keras
    import numpy as np

    import unisono

    strategy = unisono.MultiWorkerMirroredStrategy()
    assert strategy.num_workers == 2
    own = Path(folder) / f"steps-{strategy.worker_index}"
    generation = os.environ.get("UNISONO_GENERATION", "0")

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            with own.open("a") as file:
                file.write(f"{generation}\n")
            if stays and (strategy.worker_index, generation) == (1, "0"):
                time.sleep(600 if len(own.read_text().split()) == 9 else 0)

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
    kept = unisono.callbacks.BackupAndRestore(backup or str(Path(folder) / "backup"), save_freq=1)
    every = [Steps(), kept, *callbacks]
    model.fit(x, x[:, :1], epochs=4, batch_size=8, verbose=0, callbacks=every)
    return model.get_weights()


def train_and_save(config):
    """Train in a worker of Ray Train; the first one keeps the weights."""
    import numpy as np
    import ray.train

    import unisono

    report = unisono.ray.ReportCallback(save_every=4)
    weights = trained(config["folder"], backup=unisono.ray.storage_path("backup"), callbacks=[report])
    shard_loss = loss_of_shards(ray.train.get_dataset_shard("train"))
    if ray.train.get_context().get_world_rank() == 0:
        np.savez(Path(config["folder"]) / "weights.npz", *weights)
        np.save(Path(config["folder"]) / "shard_loss.npy", shard_loss)


def train_with_a_kill(config):
    """Train in a worker of Ray Train; the second one is killed in its ninth step, once."""
    import os
    import signal

    import keras
    import numpy as np
    import ray.train

    import unisono

    rank, killed = ray.train.get_context().get_world_rank(), Path(config["folder"]) / "killed"

    def kill(batch, logs):
        steps = len((Path(config["folder"]) / "steps-1").read_text().split())
        if rank == 1 and steps == 9 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=kill)
    weights = trained(config["folder"], backup=unisono.ray.storage_path("backup"), callbacks=[callback])
    if rank == 0:
        np.savez(Path(config["folder"]) / "weights.npz", *weights)


def loss_of_shards(shard):
    """Return the loss of each of two epochs over Ray's data, of which each worker has a part."""
    import keras

    import unisono
    from unisono.data import Dataset

    strategy = unisono.MultiWorkerMirroredStrategy()

    def batches():
        for batch in shard.iter_batches(batch_size=4):
            yield batch["x"], batch["y"]

    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    data = strategy.distribute_datasets_from_function(lambda context: Dataset.from_generator(batches))
    return model.fit(data, epochs=2, verbose=0).history["loss"]


def served(x):
    """Train with a parameter server, and return the losses."""
    import keras

    import unisono

    strategy = unisono.ParameterServerStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model.fit(x, x[:, :1], epochs=2, batch_size=8, shuffle=False, verbose=0).history["loss"]
