"""Gradients, metrics and moving statistics of several workers in one message.

Between workers every all-reduce is a round of messages. Keras computes the gradients, applies
them, and then updates the metrics: two rounds, and a third one for the moving statistics of
BatchNormalization. But what a replica adds to both is known before the first. So the step is traced once
without communication, to get these values, and once more with them piggybacked on the all-reduce of the
gradients. XLA folds what both
traces have in common (docs/architecture.md, idea 5), so nothing is computed twice.

Tests: tests/virtual/strategies/test_multi_worker_program.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import jax
import jax.numpy as jnp
import keras

from unisono._context import ReplicaEngine
from unisono._types import PyTree, Tree
from unisono._values import ReduceOp
from unisono.training.replica._rows import has_own


class NeedsPeersError(Exception):
    """The step needs the other replicas' values for more than a sum of gradients."""


class _EngineOnTop:
    """An engine that does what another one does."""

    is_empty = False

    def __init__(self, engine: ReplicaEngine) -> None:
        self._engine = engine
        self.num_replicas = engine.num_replicas

    @property
    def replica_id(self) -> int | jax.Array:
        """This replica's number."""
        return self._engine.replica_id

    def total(self, size: int) -> int:
        """Return what the engine does."""
        return self._engine.total(size)

    def all_gather(self, tree: Tree, axis: int) -> Tree:
        """Return what the engine does."""
        return self._engine.all_gather(tree, axis)

    def exchange(self, tree: PyTree) -> PyTree:
        """Return what the engine does."""
        return self._engine.exchange(tree)


class DryRunEngine(_EngineOnTop):
    """An engine without communication: `all_reduce` is the identity, and calls are counted."""

    calls = 0

    def all_reduce(self, op: ReduceOp, tree: Tree) -> Tree:
        """Return the replica's own values."""
        self.calls += 1
        return tree

    def all_gather(self, tree: object, axis: int) -> NoReturn:
        """Reject the call: the result has another shape than this replica's values."""
        raise NeedsPeersError

    def exchange(self, tree: object) -> NoReturn:
        """Reject the call, as `all_gather` does."""
        raise NeedsPeersError


class FusingEngine(_EngineOnTop):
    """An engine that sums further values in the message of its first all-reduce.

    Args:
        piggybacked: arrays to be summed over the replicas.
    """

    def __init__(self, engine: ReplicaEngine, piggybacked: Sequence[jax.Array]) -> None:
        super().__init__(engine)
        self._piggybacked: list[jax.Array] | None = list(piggybacked)
        #: The sums of the piggybacked arrays, after the first all-reduce.
        self.sums: list[jax.Array] = []

    def all_reduce(self, op: ReduceOp, tree: Tree) -> Tree:
        """All-reduce `tree`; in the first call together with the piggybacked arrays."""
        if self._piggybacked is None:
            return self._engine.all_reduce(op, tree)
        piggybacked, self._piggybacked = self._piggybacked, None
        # One message has one operation: a mean of gradients is their sum, divided here.
        summed, self.sums = self._engine.all_reduce(ReduceOp.SUM, (tree, piggybacked))
        if op is ReduceOp.SUM:
            return summed
        mean: Tree = jax.tree.map(lambda x: (x / self.num_replicas).astype(x.dtype), summed)
        return mean


def can_fuse(model: keras.Model) -> bool:
    """Return whether a model's training step is Keras' own: another may compute metrics from anything."""
    return not has_own(model, "train_step")


def are_sums(values: Sequence[jax.Array]) -> bool:
    """Return whether values are floats, as gradients are: one message has one operation on one type."""
    return all(jnp.issubdtype(v.dtype, jnp.inexact) for v in values)
