"""Without Keras: pytrees, Optax and Flax NNX state through `strategy.run`.

    python examples/pure_jax.py

State that is the same on every replica travels as `Mirrored`: the step sees the bare value, and
what it returns as `Mirrored` comes back once. Batches are split; gradients are reduced by hand.
"MEAN" is the mean over replicas, that of one device where all have equally many rows. For other batches
divide sums: `n = replica.all_reduce("SUM", float(len(rows)))`, and `all_reduce("SUM", sum_of_losses / n)`.

Needs Optax and Flax (`pip install optax flax`); 15 s on two cores.
"""

import numpy as np
import unisono

strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])

import jax
import jax.numpy as jnp
import optax
from flax import nnx

rng = np.random.default_rng(0)
x = rng.normal(size=(256, 8)).astype("f4")
y = x @ rng.normal(size=(8, 1)).astype("f4")
batches = strategy.distribute_dataset([(x[i : i + 64], y[i : i + 64]) for i in range(0, 256, 64)])

# --- plain pytrees and Optax ---
optimizer = optax.adam(0.05)
params = unisono.Mirrored({"w": jnp.zeros((8, 1)), "b": jnp.zeros(())})
state = unisono.Mirrored(optimizer.init(params.value))


def step(params, state, batch):
    def loss_of(params):
        features, targets = batch
        return jnp.mean((features @ params["w"] + params["b"] - targets) ** 2)

    replica = unisono.get_replica_context()
    loss, grads = jax.value_and_grad(loss_of)(params)
    loss, grads = replica.all_reduce("MEAN", (loss, grads))
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    return unisono.Mirrored(params), unisono.Mirrored(state), unisono.Mirrored(loss)


for _ in range(30):
    for batch in batches:
        params, state, loss = strategy.run(step, args=(params, state, batch))
print(f"Optax: loss {float(loss.value):.5f}")

# --- Flax NNX: the module's graph is static, its state is a pytree ---
model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
graph, weights = nnx.split(model)
weights = unisono.Mirrored(weights)
state = unisono.Mirrored(optimizer.init(weights.value))


def nnx_step(weights, state, batch):
    def loss_of(weights):
        features, targets = batch
        return jnp.mean((nnx.merge(graph, weights)(features) - targets) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(weights)
    loss, grads = unisono.get_replica_context().all_reduce("MEAN", (loss, grads))
    updates, state = optimizer.update(grads, state, weights)
    weights = optax.apply_updates(weights, updates)
    return unisono.Mirrored(weights), unisono.Mirrored(state), unisono.Mirrored(loss)


for _ in range(30):
    for batch in batches:
        weights, state, loss = strategy.run(nnx_step, args=(weights, state, batch))
print(f"Flax NNX: loss {float(loss.value):.5f}")
