"""A stateful step of a model as the function of one replica, in the manner of those given to `strategy.run`.

Tests: tests/virtual/training/stateful/test_steps.py.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras

from unisono._context import Context, OneReplica, ReplicaContext, ReplicaEngine, current, entered
from unisono._errors import InvalidTypeError
from unisono._types import PyTree
from unisono._values import Mirrored
from unisono.step._program import ReplicaFrame, current_frame
from unisono.step._scope import StateScope
from unisono.training.stateful._replica_metrics import ReplicaMetrics
from unisono.training.trainer._trainer_step import TrainerTask

if TYPE_CHECKING:
    from unisono.strategies._replicated import ReplicatedStrategy


@dataclasses.dataclass(frozen=True, eq=False)
class StatefulStep:
    """One of a model's steps in TensorFlow's form."""

    model: keras.Model
    strategy: ReplicatedStrategy
    task: TrainerTask
    #: Variables that a whole batch's step has used, by `id`.
    used: dict[int, keras.Variable] = dataclasses.field(default_factory=dict)

    def split(self, batch: PyTree) -> Mirrored[PyTree]:
        """Run the step of one replica on its part of the rows; return the logs, or predictions, of all."""
        context, frame = self._running()
        if context.replica is None or context.replica.num_replicas_in_sync == 1:
            return self.whole(batch)
        engine = context.replica.engine
        metrics = ReplicaMetrics(self.model, engine, frame.scope)
        # A context of its own: optimizers note in it whose loss was scaled.
        own = ReplicaContext(self.strategy, engine)
        with entered(dataclasses.replace(context, replica=own, means=True)), metrics.in_parts():
            result = self._step(batch)
        if self.task is TrainerTask.PREDICT:
            return Mirrored(jax.tree.map(lambda x: engine.all_gather(x, 0), result))
        return Mirrored(metrics.logs(result))

    def whole(self, batch: PyTree) -> Mirrored[PyTree]:
        """Run the step as one replica of one: every device computes the same."""
        context, frame = self._running()
        own = ReplicaContext(self.strategy, OneReplica())
        if context.replica is not None and context.replica.num_replicas_in_sync > 1:
            self._unite_copies(context.replica.engine, frame.scope)
        with entered(dataclasses.replace(context, replica=own, means=True)), frame.scope.synced():
            result = self._step(batch)
        self.used.update(frame.scope.seen)
        return Mirrored(result)

    def _unite_copies(self, engine: ReplicaEngine, scope: StateScope) -> None:
        """Give all replicas the mean of the copies of each variable that has one for each replica.

        Steps of split batches add gradients up in such copies. Where every replica computes the step of all
        rows, it takes their mean, as of gradients: with its own copy each would update weights differently.
        """
        for key, variable in self.used.items():
            value = scope.state_mapping.get(key)
            if not isinstance(value, jax.Array) or getattr(variable, "stored_copies", None) is None:
                continue
            if jnp.issubdtype(value.dtype, jnp.inexact):
                copies = engine.all_gather(value[None], 0)
                # Exact where the copies are equal.
                scope.state_mapping[key] = copies[0] + jnp.mean(copies - copies[0], axis=0)

    def alone(self, batch: PyTree) -> PyTree:
        """Run the step where there is one replica; return the logs or predictions."""
        return self.whole(batch).value

    def _running(self) -> tuple[Context, ReplicaFrame]:
        """Return the context and the execution that this code is part of."""
        context, frame = current(), current_frame()
        if frame is None:
            raise RuntimeError("A stateful step runs within a program.")
        return context or Context(self.strategy), frame

    def _step(self, batch: PyTree) -> Any:
        name = self.task.step
        result = getattr(self.model, name)(batch)
        if self.task is not TrainerTask.PREDICT and not isinstance(result, dict):
            raise InvalidTypeError(
                f"`{name}` must return a dictionary of results. Received: {type(result).__name__}, from "
                f"`{type(self.model).__name__}.{name}`. Write "
                "`return {m.name: m.result() for m in self.metrics}`."
            )
        return result
