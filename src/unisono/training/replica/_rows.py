"""Rows of a batch, gathered where they meet."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import ReplicaEngine


def gather_rows(tree: Any, engine: ReplicaEngine, means: bool = True) -> Any:
    """Return the rows of all replicas, in order, on every replica.

    Args:
        tree: pytree of arrays with this replica's rows; scalars and None pass.
        engine: this replica.
        means: whether gradients are averaged over replicas afterwards, as in `fit`. Then every
            replica must compute the same of the rows.
    """

    def gathered(x: Any) -> Any:
        if jnp.ndim(x) == 0:
            return x
        if x.dtype == jnp.bool_:
            return gathered(x.astype(jnp.int32)).astype(jnp.bool_)
        return _gathered(x, engine) if means else engine.all_gather(x, 0)

    return jax.tree.map(gathered, tree)


def first_rows(tree: Any, rows: int) -> Any:
    """Return the first rows of all arrays.

    Args:
        tree: pytree of arrays; scalars pass.
        rows: how many.
    """
    return jax.tree.map(lambda x: x[:rows] if jnp.ndim(x) else x, tree)


def own_rows(x: Any, rows: int, engine: ReplicaEngine) -> Any:
    """Return a replica's part of an array of all replicas' rows.

    Args:
        x: array of all rows, in the order of the replicas.
        rows: how many are this replica's.
        engine: this replica.
    """
    if not isinstance(engine.replica_id, int):
        return jax.lax.dynamic_slice_in_dim(x, engine.replica_id * rows, rows)
    sizes = [engine.total(rows * (engine.replica_id == i)) for i in range(engine.num_replicas)]
    start = sum(sizes[: engine.replica_id])
    return x[start : start + rows]


def _gathered(x: Any, engine: ReplicaEngine) -> Any:
    rows, replicas = x.shape[0], engine.num_replicas

    @jax.custom_vjp
    def gather(x: Any) -> Any:
        return engine.all_gather(x, 0)

    def forward(x: Any) -> tuple[Any, None]:
        return gather(x), None

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        # Every replica computes the same loss, so the cotangent is at hand: no communication. It is
        # multiplied because `fit` averages gradients.
        own = jax.lax.dynamic_slice_in_dim(cotangent, engine.replica_id * rows, rows)
        return (own * replicas,)

    gather.defvjp(forward, backward)
    return gather(x)


def rows_of(given: Any) -> int | None:
    """Return how many rows all arrays have; None where they do not agree, or have none.

    Args:
        given: pytree of arrays; scalars do not count.
    """
    sizes = {np.shape(x)[:1] for x in jax.tree.leaves(given) if np.ndim(x)}
    return sizes.pop()[0] if len(sizes) == 1 else None


class Aside(keras.StatelessScope):
    """Reads variables as the code around it does, and forgets what is written inside."""

    def get_current_value(self, variable: Any) -> Any:
        """Return the value written inside, or that of the scope around."""
        value = super().get_current_value(variable)
        if value is not None or self.original_scope is None:
            return value
        return self.original_scope.get_current_value(variable)
