"""A wide-and-deep recommender whose table of 10 million rows lies on two parameter servers.

unisono launch -n 2 --ps 2 --chief examples/wide_and_deep.py
unisono launch -n 2 --ps 2 --chief examples/wide_and_deep.py --rows 20000 --steps 300    # a small one

A click depends on the user's taste, on the item's, and on how well both fit. Users and items are hashed into
one table, of which a step uses a few thousand rows: these alone travel, and only the servers have the table.
The data are made on the spot. The result is compared with the rate of clicks, and with the best possible one.

Needs the extra `cluster`.
"""

import argparse
import resource

import unisono  # before Keras, so that it runs on JAX
import keras
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=10_000_000, help="of the table")
parser.add_argument("--width", type=int, default=16, help="of a row")
parser.add_argument("--batch", type=int, default=512)
parser.add_argument("--steps", type=int, default=1000, help="in each of three epochs")
options = parser.parse_args()

# In workers and parameter servers the constructor serves the chief, and does not return.
strategy = unisono.ParameterServerStrategy(
    variable_partitioner=unisono.partitioners.MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=2),
    max_staleness=8,
)

USERS, ITEMS = 600, 300
TASTE = np.random.default_rng(0).normal(size=(USERS + ITEMS, 3)).astype("float32")


def made(rows, seed):
    """Return users and items, clicks, and how likely each of these was."""
    rng = np.random.default_rng(seed)
    # A few users and items are seen often, most of them seldom.
    user = (USERS * rng.random(rows) ** 2).astype("int32")
    item = (ITEMS * rng.random(rows) ** 2).astype("int32")
    one, two = TASTE[user], TASTE[USERS + item]
    fit = one[:, 0] + two[:, 0] + 2 * (one[:, 1:] * two[:, 1:]).sum(1)
    likely = 1 / (1 + np.exp(-fit.astype("float64")))
    # Of pages each is seen once, and means nothing: the model must learn that.
    page = rng.integers(0, 1 << 30, rows, dtype="int32")
    return {"user": user, "item": item, "page": page}, (rng.random(rows) < likely).astype("float32"), likely


def log_loss(likely, clicks):
    return float(-np.mean(np.log(np.where(clicks > 0, likely, 1 - likely))))


class WideAndDeep(keras.Model):
    def __init__(self):
        super().__init__()
        # One table for the deep part of users and items, one of single numbers for the wide part.
        self.deep_table = keras.layers.Embedding(
            options.rows,
            options.width,
            embeddings_initializer=keras.initializers.RandomUniform(-0.3, 0.3),
            name="deep_table",
        )
        self.wide_table = keras.layers.Embedding(
            options.rows, 1, embeddings_initializer="zeros", name="wide_table"
        )
        self.hidden = [keras.layers.Dense(n, activation="relu") for n in (32, 16)]
        self.out = keras.layers.Dense(1)

    def call(self, x):
        # Hashed in the step: the rows of a batch are known to its worker alone.
        user = (x["user"] * 7919 + 13) % options.rows
        item = (x["item"] * 104_729 + 7_654_321) % options.rows
        ids = keras.ops.stack([user, item, x["page"] % options.rows], axis=1)
        deep = self.deep_table(ids)
        fit = deep[:, 0] * deep[:, 1]
        deep = keras.ops.concatenate([deep[:, 0], deep[:, 1], deep[:, 2], fit], axis=1)
        for layer in self.hidden:
            deep = layer(deep)
        wide = keras.ops.sum(self.wide_table(ids[:, :2]), axis=1)
        return wide + self.out(deep) + keras.ops.sum(fit, axis=1, keepdims=True)


with strategy.scope():
    keras.utils.set_random_seed(0)
    model = WideAndDeep()
    model.compile(
        optimizer=keras.optimizers.Adagrad(1.0),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )

for epoch in range(3):
    x, clicks, _ = made(options.batch * options.steps, seed=1 + epoch)
    model.fit(x, clicks, batch_size=options.batch, verbose=2)

x, clicks, likely = made(20_000, seed=99)
loss, auc = model.evaluate(x, clicks, batch_size=options.batch, verbose=0)
rate = np.full_like(likely, clicks.mean())
print(f"Log loss: {loss:.4f}")
print(
    f"Log loss of the rate of clicks: {log_loss(rate, clicks):.4f}, at best: {log_loss(likely, clicks):.4f}"
)
print(f"AUC: {auc:.4f}")

rows = sum(len(np.unique(ids[: options.batch])) for ids in x.values())
table = model.deep_table.embeddings
print(f"Rows of a step: {rows} of {options.rows}, about {rows * options.width * 4 / 1e3:.0f} kB each way")
if strategy._has_cluster:
    print(f"Servers of the table: {len(strategy._job.variables[table].homes)}")
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(
    f"The chief's largest size: {peak:.0f} MB; the table has {options.rows * options.width * 4 / 1e6:.0f} MB"
)
