"""A stateful step of a model as the function of one replica, in the manner of those given to `strategy.run`.

While it runs on several replicas, each adds its part to the metrics, and the parts are summed when the step
is done. Where the step reads a result, it gets that of all replicas, as in TensorFlow: one all-reduce in the
middle of the step. A result that the step only returns is computed from the sums at its end, and the
all-reduce in the middle is removed.

Tests: tests/virtual/training/stateful/test_steps.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import keras

from unisono._context import Context, OneReplica, ReplicaEngine, current, entered
from unisono._errors import InvalidTypeError
from unisono._types import PyTree, Tree
from unisono._values import Mirrored, ReduceOp
from unisono.step._keras_internals import all_layers
from unisono.step._program import ReplicaFrame, current_frame
from unisono.step._scope import StateScope
from unisono.step.variables._merge_rules import Merge, kind_of, localize, merge_all, merge_rule
from unisono.training.trainer._trainer_step import TrainerTask, as_float

if TYPE_CHECKING:
    from unisono.step._replicas import Replicas
    from unisono.step._value_handle import VariableValue

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, eq=False)
class StatefulStep:
    """One of a model's steps in TensorFlow's form."""

    model: keras.Model
    replicas: Replicas
    task: TrainerTask
    #: Variables that a whole batch's step has used, by `id`.
    used: dict[int, keras.Variable] = dataclasses.field(default_factory=dict)

    def split(self, batch: PyTree) -> Mirrored[PyTree]:
        """Run the step of one replica on its part of the rows; return the logs, or predictions, of all."""
        context, frame = self._running()
        if context.replica is None or context.replica.num_replicas_in_sync == 1:
            return self.whole(batch)
        engine = context.replica._engine
        metrics = ReplicaMetrics(self.model, engine, frame.scope)
        # A context of its own: optimizers note in it whose loss was scaled.
        own = self.replicas.replica(engine)
        with entered(dataclasses.replace(context, replica=own, means=True)), metrics.in_parts():
            result = self._step(batch)
        if self.task is TrainerTask.PREDICT:
            return Mirrored(jax.tree.map(lambda x: engine.all_gather(x, 0), result))
        return Mirrored(metrics.logs(result))

    def whole(self, batch: PyTree) -> Mirrored[PyTree]:
        """Run the step as one replica of one: every device computes the same."""
        context, frame = self._running()
        own = self.replicas.replica(OneReplica())
        if context.replica is not None and context.replica.num_replicas_in_sync > 1:
            self._unite_copies(context.replica._engine, frame.scope)
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
        return context or self.replicas.context(), frame

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


class ReplicaMetrics:
    """A replica's part of a model's metrics, during one execution of a step."""

    def __init__(self, model: keras.Model, engine: ReplicaEngine, scope: StateScope) -> None:
        self._engine, self._scope = engine, scope
        self._metrics = _metrics_of(model)
        variables = {id(v): v for m in self._metrics for v in m.variables}
        self._variables = [v for v in variables.values() if _rule(v) is not Merge.STACK]
        #: Results that the step has read: each with its metric, and the values that it was computed from.
        self._read: list[tuple[object, keras.Metric, list[jax.Array]]] = []
        self._is_computing = False

    @contextlib.contextmanager
    def in_parts(self) -> Iterator[None]:
        """Let metrics hold this replica's part in a block, and afterwards the sums."""
        before = self._values()
        parts = [localize(_rule(v), x, self._engine) for v, x in zip(self._variables, before, strict=True)]
        self._assign(self._variables, parts)
        parts = self._values()
        with contextlib.ExitStack() as results:
            for metric in self._metrics:
                results.enter_context(_result_by(metric, self._result))
            yield
        # Not where the block is left by an error.
        after = self._values()
        self._end = {id(v): x for v, x in zip(self._variables, after, strict=True)}
        changed = [i for i, (a, b) in enumerate(zip(parts, after, strict=True)) if a is not b]
        merged = self._merged([self._variables[i] for i in changed], [after[i] for i in changed])
        for i, value in zip(changed, merged, strict=True):
            before[i] = value
        self._assign(self._variables, before)

    def logs(self, logs: Tree) -> Tree:
        """Return the logs of all replicas; after `in_parts`."""
        leaves, structure = jax.tree.flatten(logs)
        leaves = [leaf.value if isinstance(leaf, keras.Variable) else leaf for leaf in leaves]
        final: dict[int, object] = {}
        for found, metric, values in self._read:
            if all(self._end.get(id(v)) is x for v, x in zip(metric.variables, values, strict=True)):
                pairs = zip(jax.tree.leaves(found), jax.tree.leaves(metric.result()), strict=True)
                final |= {id(read): now for read, now in pairs}
        others = [leaf for leaf in leaves if id(leaf) not in final]
        means = iter(self._engine.all_reduce(ReduceOp.MEAN, [as_float(x) for x in others]))
        reduced: Tree = jax.tree.unflatten(
            structure, [final[id(x)] if id(x) in final else next(means) for x in leaves]
        )
        return reduced

    def _result(self, original: Callable[[], Result], metric: keras.Metric) -> Result:
        """Return a metric's result over all replicas."""
        if self._is_computing:
            return original()
        variables = list(metric.variables)
        values = [v.value for v in variables]
        pairs = list(zip(variables, self._merged(variables, values), strict=True))
        self._is_computing = True
        try:
            with keras.StatelessScope(pairs):
                found = original()
        finally:
            self._is_computing = False
        self._read.append((found, metric, values))
        return found

    def _merged(
        self, variables: Sequence[keras.Variable], values: Sequence[VariableValue]
    ) -> list[VariableValue]:
        return merge_all([_rule(v) for v in variables], list(values), self._engine)

    def _values(self) -> list[VariableValue]:
        return [self._scope.get_current_value(v) for v in self._variables]

    def _assign(self, variables: Sequence[keras.Variable], values: Sequence[VariableValue]) -> None:
        for variable, value in zip(variables, values, strict=True):
            self._scope.merged(variable, value)


def _rule(variable: keras.Variable) -> Merge:
    return merge_rule(kind_of(variable))


def _metrics_of(model: keras.Model) -> list[keras.Metric]:
    """Return the metrics of a model and its layers, and those inside of them, each once."""
    found = {id(m): m for m in model.metrics}
    for layer in all_layers(model):
        found |= {id(m): m for m in layer.metrics}
    return list(found.values())


@contextlib.contextmanager
def _result_by(metric: keras.Metric, compute: Callable[..., object]) -> Iterator[None]:
    """Let a metric compute its result in another way in a block."""
    own = vars(metric)
    before = own.get("result")
    # Of the class: a step that is executed again, for a derivative, is in the middle of this block.
    original = functools.partial(type(metric).result, metric)
    own["result"] = lambda: compute(original, metric)
    try:
        yield
    finally:
        own.pop("result")
        if before is not None:
            own["result"] = before
