"""One script for all tasks: digits by `fit`, then a loop with a coordinator.

In tasks other than the chief the strategy's constructor does not return.
"""

import json
import os

import keras
import numpy as np
from sklearn.datasets import load_digits

import unisono

strategy = unisono.experimental.ParameterServerStrategy(
    variable_partitioner=unisono.partitioners.FixedShardsPartitioner(2)
)
print("the chief is", json.loads(os.environ["TF_CONFIG"])["task"], flush=True)

x, y = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(x))
x, y = (x[order] / 16).astype("float32"), y[order]
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(0.003), loss=loss, metrics=["accuracy"])


class Signal(keras.callbacks.Callback):
    """Lets the test kill a worker while steps are in flight."""

    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch, flush=True)


history = model.fit(x[:1500], y[:1500], batch_size=50, epochs=12, verbose=0, callbacks=[Signal()]).history
print("steps", int(model.optimizer.iterations.numpy()))
print("accuracy", model.evaluate(x[1500:], y[1500:], verbose=0)[1])

kernel = model.layers[0].kernel
whole = [np.array_equal(kernel[30:34], kernel.numpy()[30:34]), len(kernel.variables)]
print("divided", *whole)

coordinator = unisono.coordinator.ClusterCoordinator(strategy)


@unisono.function
def count(iterator):
    rows, _ = next(iterator)
    return keras.ops.sum(keras.ops.ones_like(rows[:, 0]))


def dataset_fn(context):
    dataset = unisono.data.Dataset.from_tensor_slices((x, y))
    return dataset.shard(context.num_input_pipelines, context.input_pipeline_id).batch(10).repeat()


iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
counts = [coordinator.schedule(count, args=(iterator,)) for _ in range(20)]
coordinator.join()
print("counted", np.sum(coordinator.fetch(counts)), flush=True)
