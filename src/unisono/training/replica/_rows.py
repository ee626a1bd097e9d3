"""Rows of a batch on the replicas: gathered where they depend on each other, and each replica's own part.

Tests: tests/virtual/models/test_losses_and_metrics.py.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import ReplicaEngine
from unisono._types import PyTree, Tree

#: Attribute of a layer that is meant to see the rows of one replica alone; see `per_replica`.
PER_REPLICA = "_unisono_per_replica"


class StandInEngine(abc.ABC):
    """An engine for a step that is read before it runs: arrays stand for what replicas would reduce."""

    @abc.abstractmethod
    def like(self, x: jax.Array) -> jax.Array:
        """Return an array that is equal on all replicas, without a derivative."""

    @abc.abstractmethod
    def updated(self, values: Sequence[jax.Array]) -> list[jax.Array] | None:
        """Return arrays in place of what an optimizer makes of values and of reduced gradients.

        None where the values are others than those with which the step begins.
        """


def gather_rows(tree: Tree, engine: ReplicaEngine, means: bool = True) -> Tree:
    """Return the rows of all replicas, in order, on every replica.

    Args:
        tree: pytree of arrays with this replica's rows; scalars and None pass.
        means: whether gradients are averaged over replicas afterwards, as in `fit`. Then every
            replica must compute the same of the rows.
    """

    def gathered(x: jax.Array) -> jax.Array:
        if jnp.ndim(x) == 0:
            return x
        if x.dtype == jnp.bool_:
            return gathered(x.astype(jnp.int32)).astype(jnp.bool_)
        if means:
            return _gathered(x, engine)
        return engine.all_gather(x, 0)

    everyones: Tree = jax.tree.map(gathered, tree)
    return everyones


def first_rows(tree: Tree, rows: int) -> Tree:
    """Return the first rows of all arrays.

    Args:
        tree: pytree of arrays; scalars pass.
    """
    first: Tree = jax.tree.map(lambda x: x[:rows] if jnp.ndim(x) else x, tree)
    return first


def own_rows(x: jax.Array, rows: int, engine: ReplicaEngine) -> jax.Array:
    """Return a replica's part of an array of all replicas' rows."""
    if not isinstance(engine.replica_id, int):
        return jax.lax.dynamic_slice_in_dim(x, engine.replica_id * rows, rows)
    # Replicas of unequal rows are traced in turn, each with a Python number: sizes are known while tracing.
    sizes = [engine.total(rows * (engine.replica_id == i)) for i in range(engine.num_replicas)]
    start = sum(sizes[: engine.replica_id])
    return x[start : start + rows]


def _gathered(x: jax.Array, engine: ReplicaEngine) -> jax.Array:
    rows, replicas = x.shape[0], engine.num_replicas

    @jax.custom_vjp
    def gather(x: jax.Array) -> jax.Array:
        return engine.all_gather(x, 0)

    def forward(x: jax.Array) -> tuple[jax.Array, None]:
        return gather(x), None

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        # Every replica computes the same loss, so it has the cotangents of all rows, and its own need no
        # communication. They are multiplied because `fit` averages gradients.
        own = jax.lax.dynamic_slice_in_dim(cotangent, engine.replica_id * rows, rows)
        return (own * replicas,)

    gather.defvjp(forward, backward)
    result: jax.Array = gather(x)
    return result


def rows_of(given: PyTree) -> int | None:
    """Return how many rows all arrays have; None where they do not agree, or have none.

    Args:
        given: pytree of arrays; scalars do not count.
    """
    sizes = {np.shape(x)[:1] for x in jax.tree.leaves(given) if np.ndim(x)}
    return sizes.pop()[0] if len(sizes) == 1 else None


def common_rows(given: PyTree) -> int | None:
    """Return the number of rows of which all arrays have a multiple; None where an array has none.

    An output may have several entries for each row, one behind the other.

    Args:
        given: pytree of arrays; scalars do not count.

    >>> common_rows((np.zeros((4, 3)), np.zeros(12)))
    4
    """
    sizes = [np.shape(x)[0] for x in jax.tree.leaves(given) if np.ndim(x)]
    if not sizes or (0 in sizes and any(sizes)):
        return None
    return math.gcd(*sizes)


class DiscardingScope(keras.StatelessScope):
    """Reads variables as the surrounding code does, and discards what is written inside."""

    def get_current_value(self, variable: keras.Variable) -> jax.Array | None:
        """Return the value written inside, or that of the scope around."""
        value: jax.Array | None = super().get_current_value(variable)
        if value is not None or self.original_scope is None:
            return value
        outer: jax.Array | None = self.original_scope.get_current_value(variable)
        return outer


def masks_of(y_pred: PyTree) -> dict[int, jax.Array]:
    """Return the masks of the tensors of a structure, by their position."""
    found = {}
    for position, tensor in enumerate(jax.tree.leaves(y_pred)):
        probe = _MaskProbe()
        probe(tensor)
        if probe.mask is not None:
            found[position] = probe.mask
    return found


class _MaskProbe(keras.Layer):
    """Finds the mask of a tensor: Keras passes it to a layer that is called with the tensor."""

    supports_masking = True

    def call(self, inputs: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Keep the mask for `_masks`."""
        self.mask = mask
        return inputs


def is_per_replica(layer: keras.Layer) -> bool:
    """Return whether a layer may see the rows of one replica alone: one that is marked, or normalizes."""
    return getattr(layer, PER_REPLICA, False) or isinstance(layer, keras.layers.BatchNormalization)


def is_synchronized(layer: keras.Layer) -> bool:
    """Return whether a layer normalizes over the rows of all replicas, as one device does."""
    return isinstance(layer, keras.layers.BatchNormalization) and bool(getattr(layer, "synchronized", False))


def has_own(model: keras.Model, method: str) -> bool:
    """Return whether a model has a method of its own, in its class or set on the object."""
    return method in vars(model) or getattr(type(model), method) is not getattr(keras.Model, method)
