"""A program that finds its cluster by itself: each worker adds its number, and prints the sum."""

import jax.numpy as jnp

import unisono

strategy = unisono.MultiWorkerMirroredStrategy()
parts = strategy.run(lambda: jnp.asarray(10.0 + unisono.get_replica_context().replica_id_in_sync_group))
print(
    type(strategy.cluster_resolver).__name__,
    f"worker {strategy.worker_index} of {strategy.num_workers}",
    f"sum {float(strategy.reduce('SUM', parts, axis=None)):g}",
    flush=True,
)
