"""Keras' methods inside a replica: losses, metrics, optimizers and BatchNormalization.

`_bind` puts these functions around Keras' methods. Where no replica runs, each does exactly what
Keras does.

- `Model.compute_loss`, `compute_metrics` see the true rows of all replicas of a padded batch.
- `Metric.stateless_result`, `Mean.update_state`, `Loss.__call__`, `Optimizer.apply`,
  `stateless_apply` work on the values of all replicas.
- `BatchNormalization._moments` makes `synchronized=True` work on JAX.

Tests: tests/virtual/models/test_losses_and_metrics.py and tests/virtual/training/test_user_losses.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import TypeAlias

import jax
import keras

from unisono._context import Context, OneReplica, ReplicaContext, current, entered
from unisono._features import load
from unisono._system._blocks import set_attribute, set_for_block
from unisono._types import KerasWrap, PyTree
from unisono.step._keras_internals import (
    compiled_metrics,
    reduced_axes,
    replace_losses,
    replaced_losses,
    trained_variables,
)
from unisono.step._layout import GradientReducer, StateLayout, is_added
from unisono.step._program import current_frame
from unisono.step._value_handle import in_parts
from unisono.step.variables._merge_rules import kind_of, merge_all, merge_rule, note_mean
from unisono.training.replica._losses import (
    added_losses,
    aggregate_gradients,
    replica_loss,
    synchronized_moments,
)
from unisono.training.replica._metrics import metrics_add_up, update_with_all_rows
from unisono.training.replica._rows import StandInEngine, first_rows, gather_rows
from unisono.training.replica._step_reading import note

#: Whether the gradients that an optimizer is given are those of all replicas already.
_AGGREGATED: ContextVar[bool] = ContextVar("unisono_aggregated", default=False)

#: What Keras gives to `Optimizer.apply`: a gradient for each variable; None for a variable without one.
Gradients: TypeAlias = Sequence[jax.Array | None]

#: Keras' state of an optimizer or metric: the values of its variables.
Values = list[jax.Array]


def wraps() -> list[KerasWrap]:
    """Return what is wrapped of losses, metrics, optimizers and BatchNormalization."""
    return [
        (keras.Model, "compute_loss", _compute_loss),
        (keras.Model, "compute_metrics", _compute_metrics),
        (keras.metrics.Metric, "stateless_result", _stateless_result),
        (keras.metrics.Mean, "update_state", _mean_update_state),
        (keras.Loss, "__call__", _loss_call),
        (keras.Optimizer, "apply_gradients", _apply_gradients),
        (keras.Optimizer, "stateless_apply", _stateless_apply),
        (keras.Optimizer, "scale_loss", _scale_loss),
        (keras.Optimizer, "apply", _apply),
        (keras.optimizers.LossScaleOptimizer, "stateless_apply", _stateless_apply),
        (keras.optimizers.LossScaleOptimizer, "scale_loss", _scale_loss),
        (keras.optimizers.LossScaleOptimizer, "apply", _apply_loss_scale),
        (keras.layers.BatchNormalization, "__init__", _batch_normalization_init),
        (keras.layers.BatchNormalization, "_moments", _batch_normalization_moments),
    ]


def _replica_context() -> Context | None:
    context = current()
    return context if context is not None and context.replica is not None else None


def _all_rows(context: Context | None, *trees: PyTree) -> list[PyTree] | None:
    """Return the true rows of all replicas, for a padded batch."""
    if context is None or context.true_rows is None or context.replica is None:
        return None
    engine = context.replica._engine
    return [first_rows(gather_rows(tree, engine), context.true_rows) for tree in trees]


def _compute_loss(
    original: Callable[..., jax.Array | None],
    self: keras.Model,
    x: PyTree = None,
    y: PyTree = None,
    y_pred: PyTree = None,
    sample_weight: PyTree = None,
    training: bool = True,
) -> jax.Array | None:
    context = _replica_context()
    rows = _all_rows(context, y, y_pred, sample_weight)
    if context is not None and rows is None and context.means and self.losses:
        before = replaced_losses(self)
        replace_losses(self, added_losses(self, x, training, context) or before)
        try:
            return original(self, x, y, y_pred, sample_weight, training)
        finally:
            # A step in TensorFlow's form may ask for `self.losses` again, and Keras' own step drops these.
            replace_losses(self, before)
    if rows is None or context is None:
        return original(self, x, y, y_pred, sample_weight, training)
    # Outside of the replica: every replica computes the loss of all rows, as one device does.
    with entered(None):
        return original(self, x, *rows, training)


def _compute_metrics(
    original: Callable[..., PyTree],
    self: keras.Model,
    x: PyTree,
    y: PyTree,
    y_pred: PyTree,
    sample_weight: PyTree = None,
) -> PyTree:
    context = _replica_context()
    if (rows := _all_rows(context, y, y_pred, sample_weight)) is not None:
        with entered(None):
            return original(self, x, *rows)
    replica = context.replica if context is not None and context.means else None
    if context is None or replica is None or replica.num_replicas_in_sync == 1:
        return original(self, x, y, y_pred, sample_weight)
    metrics, given = compiled_metrics(self), (y, y_pred, sample_weight)
    update = functools.partial(original, self, x)
    adds_up = metrics_add_up(update, metrics, given, context)
    treatment = "added up over the replicas" if adds_up else "from the rows of all replicas"
    note("metrics", treatment, f"their states are {'' if adds_up else 'no '}sums over rows")
    if adds_up:
        return update(*given)
    return update_with_all_rows(update, metrics, given, replica)


def _stateless_result(
    original: Callable[..., PyTree], self: keras.Metric, metric_variables: Values
) -> PyTree:
    """Return the result over all replicas, for a user's `train_step` in `fit` that returns it as a log.

    Within a step, a replica's copies of a metric's variables are its part of a sum.
    """
    context = _replica_context()
    if context is None or context.replica is None or not context.means or context.true_rows is not None:
        return original(self, metric_variables)
    # One all-reduce in the middle of the step: a `train_step` that reads no result does without it.
    rules = [merge_rule(kind_of(v)) for v in self.variables]
    return original(self, merge_all(rules, list(metric_variables), context.replica._engine))


def _mean_update_state(
    original: Callable[..., None], self: keras.metrics.Mean, values: PyTree, sample_weight: PyTree = None
) -> None:
    """Update a mean; a scalar that a replica adds in `fit`, such as its loss, counts 1/n.

    So in the mean over steps, a step that was split has the weight of one that ran on one replica.
    """
    context = _replica_context()
    replica = context.replica if context is not None and context.means else None
    is_part = replica is not None and not isinstance(replica._engine, OneReplica) and sample_weight is None
    # `[loss]` is a scalar, too.
    if is_part and replica is not None and not any(map(keras.ops.ndim, jax.tree.leaves(values))):
        sample_weight = 1 / replica.num_replicas_in_sync
    return original(self, values, sample_weight)


def _loss_call(
    original: Callable[..., jax.Array],
    self: keras.Loss,
    y_true: PyTree,
    y_pred: PyTree,
    sample_weight: PyTree = None,
) -> jax.Array:
    context = _replica_context()
    if context is None or context.replica is None or context.replica.num_replicas_in_sync == 1:
        return original(self, y_true, y_pred, sample_weight)
    return replica_loss(original, self, y_true, y_pred, sample_weight, context)


@contextlib.contextmanager
def _aggregated(synced: bool = True) -> Iterator[None]:
    """Mark gradients as aggregated within the block.

    `LossScaleOptimizer` calls the optimizer inside it, and `apply` may call `stateless_apply`: each of
    these is wrapped, and gradients must be aggregated once.

    Args:
        synced: whether what is written inside is equal on all replicas.
    """
    frame = current_frame()
    written = frame.scope.synced() if frame is not None and synced else contextlib.nullcontext()
    with set_for_block(_AGGREGATED, True), written:
        yield


def _must_aggregate(optimizer: keras.Optimizer) -> Context | None:
    """Return the context of a replica whose gradients are not aggregated yet, else None."""
    context = None if _AGGREGATED.get() else _replica_context() or _noting_context()
    # Gradients of a scaled loss, which `_scale_loss` has divided, are summed.
    if context is not None and context.replica is not None and id(optimizer) in context.replica.scaled_by:
        return dataclasses.replace(context, means=False)
    return context


def _noting_context() -> Context | None:
    """Return the context of code outside of the replicas whose updates the layout notes, else None."""
    context = current()
    replicated = context.strategy._replicated if context is not None else None
    if context is None or replicated is None or not replicated.state_layout.notes_updates:
        return None
    return dataclasses.replace(context, replica=ReplicaContext(replicated, OneReplica()))


def _layout_of(context: Context) -> StateLayout:
    """Return how the state of a replica's strategy lies."""
    # `_replica_context` has looked for the replica.
    replica: ReplicaContext = context.replica  # type: ignore[assignment]
    if isinstance(replica._engine, StandInEngine):
        # A step that is read sees whole values, and its gradients reach the engine.
        return StateLayout(replica.strategy.mesh)
    return replica.strategy.state_layout


def _stateless_apply(
    original: Callable[..., tuple[Values, Values]],
    self: keras.Optimizer,
    optimizer_variables: Values,
    grads: Gradients,
    trainable_variables: Values,
) -> tuple[Values, Values]:
    context = _must_aggregate(self)
    if context is None:
        return original(self, optimizer_variables, grads, trainable_variables)

    def aggregate(reduce: GradientReducer | None) -> list[jax.Array | None]:
        return aggregate_gradients(list(grads), trained_variables(self), context, reduce)

    with _aggregated():
        engine: object = context.replica._engine if context.replica is not None else None
        given = [*trainable_variables, *optimizer_variables]
        if isinstance(engine, StandInEngine) and (new := engine.updated(given)) is not None:
            aggregate(None)
            return new[: len(trainable_variables)], new[len(trainable_variables) :]
        layout = _layout_of(context)
        apply = functools.partial(original, self)
        found = layout.update(self, optimizer_variables, trainable_variables, aggregate, apply)
        if found is not None:
            return found
        return apply(optimizer_variables, _for_update(aggregate(None), context), trainable_variables)


def _for_update(grads: list[jax.Array | None], context: Context) -> list[jax.Array | None]:
    """Return the gradients of all replicas as an update should read them: on GPUs in few kernels."""
    if context.replica is None or context.replica.strategy.mesh.platform != "gpu":
        return grads
    from unisono.training.replica._side_by_side import for_update

    return for_update(grads, context.replica)


def _scale_loss(original: Callable[..., jax.Array], self: keras.Optimizer, loss: jax.Array) -> jax.Array:
    """Scale a replica's loss so that its gradients are summed, also in `fit`.

    A mean of losses would make half-precision gradients larger than on one device, by the number of
    replicas: they would overflow at a smaller scale, and float8 would record larger values.
    """
    context = _replica_context()
    scaled = original(self, loss)
    if context is None or context.replica is None or not context.means:
        return scaled
    scales = isinstance(self, keras.optimizers.LossScaleOptimizer)
    if not scales and not any(v.overwrite_with_gradient for v in trained_variables(self)):
        return scaled
    context.replica.scaled_by.add(id(self))
    return scaled / context.replica.num_replicas_in_sync


def _apply(
    original: Callable[..., None],
    self: keras.Optimizer,
    grads: Gradients,
    trainable_variables: Sequence[keras.Variable] | None = None,
) -> None:
    grads, context = list(grads), _must_aggregate(self)
    variables = trained_variables(self) if trainable_variables is None else list(trainable_variables)
    _require_gradient(grads, variables)
    if context is None:
        return original(self, grads, trainable_variables)
    if _apply_in_parts(self, grads, variables, context):
        return None
    grads = _for_update(aggregate_gradients(grads, variables, context), context)
    with _aggregated():
        original(self, grads, trainable_variables)
    _prepare(self, context)
    return None


def _require_gradient(grads: Gradients, variables: Sequence[keras.Variable]) -> None:
    if variables and all(grad is None for grad in grads):
        raise load("mistake")("no gradient", variables)


def _prepare(optimizer: keras.Optimizer, context: Context) -> None:
    """Decide how an optimizer's variables lie, in the first trace of a step, which plans its variables."""
    if _layout_of(context).prepare(optimizer):
        # The update in parts reads all variables, also where a step applies gradients of a few.
        for variable in (*trained_variables(optimizer), *optimizer.variables):
            variable.value  # noqa: B018
        # What a layout has added is written in the replicas alone, which this trace has none of.
        with _aggregated():
            for variable in filter(is_added, optimizer.variables):
                variable.assign(variable.value)


def _apply_in_parts(
    optimizer: keras.Optimizer,
    grads: list[jax.Array | None],
    variables: list[keras.Variable],
    context: Context,
) -> bool:
    """Apply gradients where the optimizer's variables lie in parts; whether they do."""
    layout = _layout_of(context)
    frame = current_frame()
    # Before a value is read: what belongs to variables without gradients is not in the plan of the step.
    if frame is None or not layout.prepare(optimizer, variables) or not frame.scope.is_innermost:
        return False
    slots, trained = list(optimizer.variables), trained_variables(optimizer)
    with in_parts():
        values = [v.value for v in slots]
    # Keras raises an error for a variable that the optimizer does not know, updates one twice that is given
    # twice, and leaves variables out for which there are no gradients at the end of the list.
    given_once = {id(v) for v in variables}
    if len(given_once) < len(variables) or not given_once <= {id(v) for v in trained}:
        return False
    variables = variables[: len(grads)]

    def aggregate(reduce: GradientReducer | None) -> list[jax.Array | None]:
        found = zip(variables, aggregate_gradients(grads, variables, context, reduce), strict=True)
        of_variable = {id(v): g for v, g in found}
        return [of_variable.get(id(v)) for v in trained]

    def apply(
        values: Sequence[jax.Array], grads: Gradients, weights: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            found: tuple[Values, Values] = optimizer.stateless_apply(values, grads, weights)
            return found
        given = {id(v): g for v, g in zip(trained, grads, strict=True)}
        pairs = [*zip(trained, weights, strict=True), *zip(slots, values, strict=True)]
        with keras.StatelessScope(pairs) as scope:
            optimizer.apply([given[id(v)] for v in variables], variables)
        return [scope.get_current_value(v) for v in trained], [scope.get_current_value(v) for v in slots]

    with _aggregated():
        found = layout.update(optimizer, values, [v.value for v in trained], aggregate, apply)
        if found is None:
            return False
        for variable, value in zip([*trained, *slots], itertools.chain(*found), strict=True):
            frame.scope.add_update((variable, value))
    return True


def _apply_loss_scale(
    original: Callable[..., None],
    self: keras.optimizers.LossScaleOptimizer,
    grads: Gradients,
    trainable_variables: Sequence[keras.Variable] | None = None,
) -> None:
    """Apply gradients in a step of a custom loop through `stateless_apply`.

    Keras' own `LossScaleOptimizer.apply` writes variables inside the branches of `lax.cond`: a scope that
    collects a step's writes would get tracers of a branch.
    """
    if current_frame() is None:
        return original(self, grads, trainable_variables)
    context = _must_aggregate(self)
    variables = trained_variables(self) if trainable_variables is None else list(trainable_variables)
    _require_gradient(grads := list(grads), variables)
    if context is not None and _apply_in_parts(self, list(grads), variables, context):
        return None
    grads = list(grads) if context is None else aggregate_gradients(list(grads), variables, context)
    if not self.built:
        self.build(variables)
    if context is not None:
        _prepare(self, context)
    wanted = trained_variables(self)
    given = {id(v): g for v, g in zip(trainable_variables or wanted, grads, strict=True)}
    with _aggregated(synced=context is not None):
        trained, own = self.stateless_apply(
            [v.value for v in self.variables], [given.get(id(v)) for v in wanted], [v.value for v in wanted]
        )
        for variable, value in zip([*wanted, *self.variables], [*trained, *own], strict=True):
            variable.assign(value)
    return None


def _apply_gradients(
    original: Callable[..., None],
    self: keras.Optimizer,
    grads_and_vars: Iterable[tuple[jax.Array | None, keras.Variable]],
    skip_gradients_aggregation: bool = False,
    experimental_aggregate_gradients: bool = True,
) -> None:
    """Apply gradients, with the two arguments of tf.keras for gradients that are aggregated already."""
    pairs = list(grads_and_vars)
    if skip_gradients_aggregation or not experimental_aggregate_gradients:
        with _aggregated(synced=False):
            return original(self, pairs)
    return original(self, pairs)


def _batch_normalization_init(
    original: Callable[..., None],
    self: keras.layers.BatchNormalization,
    *args: object,
    **kwargs: object,
) -> None:
    """Create the layer, and set `synchronized` afterwards: Keras rejects `synchronized=True` on JAX."""
    synchronized = kwargs.pop("synchronized", False)
    original(self, *args, **kwargs)
    self.synchronized = synchronized


def _batch_normalization_moments(
    original: Callable[..., tuple[jax.Array, jax.Array]],
    self: keras.layers.BatchNormalization,
    inputs: jax.Array,
    mask: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    note_mean(self.moving_mean)
    note_mean(self.moving_variance)
    context = _replica_context()
    engine: object = context.replica._engine if context is not None and context.replica is not None else None
    if isinstance(engine, StandInEngine):
        # In a step that is read, statistics are those of one replica by definition.
        return engine.like(self.moving_mean.value), engine.like(self.moving_variance.value)
    if not self.synchronized:
        return original(self, inputs, mask)
    if context is not None and context.replica is not None:
        return synchronized_moments(inputs, reduced_axes(self), mask, context.replica)
    # Keras passes it on to `ops.moments`, which rejects it on JAX.
    with set_attribute(self, "synchronized", False):
        return original(self, inputs, mask)
