"""Gradients and metrics of several workers in one message.

Between workers every all-reduce is a round of messages. Keras computes the gradients, applies
them, and then updates the metrics: two rounds. But what a replica adds to the metrics is known
before the first. So the step is traced once for itself, without the others, to get the metrics'
new values, and once more with them as passengers of the gradients. XLA folds what both traces
have in common (docs/architecture.md, idea 5), so nothing is computed twice.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras

from unisono._context import ReplicaEngine
from unisono._values import ReduceOp


class NotAloneError(Exception):
    """The step needs the others' values for more than a sum of gradients."""


class DryRunEngine:
    """A replica that hears nothing of the others, and counts how often it asked them.

    Args:
        engine: how the replica is executed.
    """

    is_empty = False

    def __init__(self, engine: ReplicaEngine) -> None:
        self._engine = engine
        self.num_replicas = engine.num_replicas
        self.calls = 0

    @property
    def replica_id(self) -> Any:
        """This replica's number."""
        return self._engine.replica_id

    def all_reduce(self, op: ReduceOp, tree: Any) -> Any:
        """Its own values."""
        self.calls += 1
        return tree

    def total(self, size: int) -> Any:
        """All replicas run one program."""
        return self._engine.total(size)

    def all_gather(self, tree: Any, axis: int) -> Any:
        """Refused.

        Raises:
            NotAloneError: always.
        """
        raise NotAloneError

    def exchange(self, tree: Any) -> Any:
        """Refused.

        Raises:
            NotAloneError: always.
        """
        raise NotAloneError


class FusingEngine:
    """A replica whose first all-reduce takes passengers along.

    Args:
        engine: how the replica is executed.
        passengers: arrays to be summed.
    """

    is_empty = False

    def __init__(self, engine: ReplicaEngine, passengers: list[Any]) -> None:
        self._engine = engine
        self._waiting: list[Any] | None = passengers
        self.num_replicas = engine.num_replicas
        self.arrived: list[Any] = []

    @property
    def replica_id(self) -> Any:
        """This replica's number."""
        return self._engine.replica_id

    def all_reduce(self, op: ReduceOp, tree: Any) -> Any:
        """All-reduce; the first takes the passengers along."""
        if self._waiting is None:
            return self._engine.all_reduce(op, tree)
        waiting, self._waiting = self._waiting, None
        summed, self.arrived = self._engine.all_reduce(ReduceOp.SUM, (tree, waiting))
        if op is ReduceOp.SUM:
            return summed
        return jax.tree.map(lambda x: (x / self.num_replicas).astype(x.dtype), summed)

    def total(self, size: int) -> Any:
        """As the engine does."""
        return self._engine.total(size)

    def all_gather(self, tree: Any, axis: int) -> Any:
        """As the engine does."""
        return self._engine.all_gather(tree, axis)

    def exchange(self, tree: Any) -> Any:
        """As the engine does."""
        return self._engine.exchange(tree)


def can_join(model: Any) -> bool:
    """Whether a model's training step is Keras' own: another one may make metrics of anything."""
    return type(model).train_step is keras.Model.train_step


def are_sums(values: list[Any]) -> bool:
    """Whether values may travel with gradients."""
    return all(jnp.issubdtype(v.dtype, jnp.inexact) for v in values)
