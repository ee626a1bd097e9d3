"""Keras losses as a replica must see them: divided by, and summed over, the rows of all replicas.

In a custom loop gradients are *summed* over the replicas, so a loss with a mean reduction
divides by the number of examples of all replicas (tf.distribute's rule). In `fit` gradients
are *averaged*, so that regularizers and losses that a user wrote with `mean` come out right
too; there the same loss is multiplied by the number of replicas. Losses that layers add, gradients and the
range of labels are here, too.

Tests: tests/virtual/models/test_losses_and_metrics.py and tests/virtual/training/test_user_losses.py.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import Context, ReplicaContext, entered
from unisono._system._blocks import set_attribute
from unisono._types import PyTree
from unisono._values import ReduceOp
from unisono.step._keras_internals import (
    function_arguments,
    replace_losses,
    replaced_losses,
    takes_training,
)
from unisono.step._layout import GradientReducer
from unisono.training.replica._rows import (
    DiscardingScope,
    common_rows,
    gather_rows,
    has_own,
    masks_of,
    own_rows,
    rows_of,
)
from unisono.training.replica._step_reading import note
from unisono.training.rows._row_analysis import RowUse, row_uses

_LOG = logging.getLogger("unisono")

#: What a model may override to change its labels.
_STEPS = ("train_step", "compute_loss")

_warned: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def check_labels(model: keras.Model, labels: PyTree, weights: PyTree = None) -> None:
    """Warn where the loss takes labels for the numbers of classes, and the model lacks some of these.

    Labels on devices are not read, as that would wait for them.

    Args:
        model: compiled; one of several outputs, of an unknown shape or with a step of its own is not checked.
        weights: of the same rows: where there are any, some labels may not count.
    """
    if weights is not None or not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iuf":
        return
    loss, classes = model.loss, _classes_of(model, labels)
    if classes is None or not _takes_numbers(loss) or model in _warned:
        return
    ignored = function_arguments(loss).get("ignore_class")
    counted = labels if ignored is None else labels[labels != ignored]
    if not counted.size or (counted.min() >= 0 and counted.max() < classes):
        return
    _warned.add(model)
    low, high = int(counted.min()), int(counted.max())
    _LOG.warning(
        "Labels must be whole numbers from 0 to %d, as %r has %d classes. Received: labels from %d to %d. "
        "Keras' loss is 0 for the others, so that nothing is learned of them. Write %s.",
        classes - 1, model.name, classes, low, high, _remedy(low, high, classes),
    )  # fmt: skip


def _remedy(low: int, high: int, classes: int) -> str:
    if low < 0:
        return f"`SparseCategoricalCrossentropy(ignore_class={low})`, where {low} stands for no class"
    return f"`y - {low}`" if high - low < classes else f"a last layer of {high + 1} units"


def _takes_numbers(loss: object) -> bool:
    if isinstance(loss, keras.losses.SparseCategoricalCrossentropy):
        return True
    named = ("sparse_categorical_crossentropy", "SparseCategoricalCrossentropy")
    return loss is keras.losses.sparse_categorical_crossentropy or loss in named


def _classes_of(model: keras.Model, labels: np.ndarray) -> int | None:
    """Return the length of the last axis of the output of which `labels` has all axes before."""
    outputs: list[keras.KerasTensor] = getattr(model, "outputs", None) or []
    if len(outputs) != 1 or any(has_own(model, name) for name in _STEPS):
        return None
    *rows, classes = outputs[0].shape
    # Keras itself leaves out a last axis of one.
    given = labels.shape[:-1] if labels.ndim > len(rows) and labels.shape[-1] == 1 else labels.shape
    fits = len(given) == len(rows) > 0 and all(n in (None, m) for n, m in zip(rows, given, strict=True))
    return classes if fits else None


#: What an optimizer gets for a variable.
Gradient = jax.Array | None


def aggregate_gradients(
    grads: list[Gradient],
    variables: Sequence[keras.Variable],
    context: Context,
    reduce: GradientReducer | None = None,
) -> list[Gradient]:
    """Return the gradients that an optimizer must apply, equal on all replicas.

    Args:
        grads: this replica's; None for a variable without one.
        variables: one for each gradient. Where `overwrite_with_gradient` is set, the gradient is the
            variable's next value: float8's history of largest values.
        reduce: what is called instead of an all-reduce; it may leave each replica its part.
    """
    replica = context.replica
    if replica is None or replica.num_replicas_in_sync == 1:
        return grads
    if replica._engine.is_empty:
        # A mean over no rows is NaN.
        grads = [None if g is None else jnp.zeros_like(g) for g in grads]
    next_values = {i for i, v in enumerate(variables) if getattr(v, "overwrite_with_gradient", False)}
    reduced = {i: g for i, g in enumerate(grads) if g is not None and i not in next_values}
    largest = {i: g for i, g in enumerate(grads) if g is not None and i in next_values}
    op, given = ReduceOp.MEAN if context.means else ReduceOp.SUM, list(reduced.values())
    sums = (
        replica.all_reduce(op, given)
        if reduce is None
        else reduce(op, given, [variables[i] for i in reduced])
    )
    found: dict[int, Gradient] = dict(zip(reduced, sums, strict=True))
    if largest:
        found |= dict(zip(largest, _largest(list(largest.values()), replica), strict=True))
    return [found.get(i) for i in range(len(grads))]


def _largest(values: list[jax.Array], replica: ReplicaContext) -> list[jax.Array]:
    """Return the largest of all replicas' values, place by place, in one message."""
    # An engine adds, and gathers: the histories are a few hundred numbers, so gathering costs nothing.
    flat = jnp.concatenate([v.astype(jnp.float32).reshape(-1) for v in values])
    ends = list(itertools.accumulate(v.size for v in values))[:-1]
    best = jnp.split(jnp.max(replica._engine.all_gather(flat[None], 0), axis=0), ends)
    return [x.reshape(v.shape).astype(v.dtype) for x, v in zip(best, values, strict=True)]


def added_losses(model: keras.Model, x: PyTree, training: bool, context: Context) -> list[jax.Array] | None:
    """Return a model's additional losses as a replica in `fit` must count them; None for no change.

    `fit` averages gradients over the replicas, which is right for a mean over rows and for what does not
    depend on rows. A sum over rows is multiplied by the number of replicas. Of what is none of these all
    rows are computed together, and this is not asked (`_step_reading`).

    Args:
        model: the model, after its forward pass.
    """
    losses, replica = list(model.losses), context.replica
    regularized = sum(v.regularizer is not None for v in model.trainable_variables)
    rows = rows_of(x)
    if replica is None or replica.num_replicas_in_sync == 1 or len(losses) <= regularized or not rows:
        return None
    total = replica._engine.total(rows)
    try:
        uses = _uses(model, x, training, rows, total)
    except Exception:  # a user's layer may do anything with another number of rows
        uses = [RowUse.MIXED] * len(losses)
    if len(uses) != len(losses):
        uses = [RowUse.MIXED] * len(losses)
    replicas = replica.num_replicas_in_sync
    return [
        loss * replicas if use in (RowUse.SUM, RowUse.APART) else loss
        for loss, use in zip(losses, uses, strict=True)
    ]


def _uses(model: keras.Model, x: PyTree, training: bool, rows: int, total: int) -> list[RowUse]:
    kwargs = {"training": training} if takes_training(model) else {}

    def losses(x: PyTree) -> list[jax.Array]:
        with entered(None), DiscardingScope(collect_losses=True):
            model(x, **kwargs)
            return [jnp.sum(loss) for loss in model.losses]

    # `compute_loss` runs in Keras' stateless step, where `model.losses` gives what the step has collected.
    override = replaced_losses(model)
    replace_losses(model, [])
    try:
        return row_uses(losses, (jax.tree.map(jnp.asarray, x),), rows, total)
    finally:
        replace_losses(model, override)


_LOG = logging.getLogger("unisono")

#: A loss, or its function.
AnyLoss: TypeAlias = "keras.Loss | Callable[..., jax.Array]"

#: Keras' own `Loss.__call__`.
LossCall = Callable[..., jax.Array]

#: Targets, predictions and weights of a replica, or of all.
Given = tuple[PyTree, PyTree, PyTree]

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")

#: Attribute of a loss, or of its function, that must see one replica's rows only.
_LOCAL = "_unisono_local_rows"


def mark_local(loss: AnyLoss) -> None:
    """Note that a loss must see one replica's rows only."""
    setattr(loss, _LOCAL, True)


def _is_local(loss: AnyLoss) -> bool:
    return any(getattr(part, _LOCAL, False) for part in (loss, getattr(loss, "fn", None)))


def replica_loss(
    original: LossCall,
    loss: keras.Loss,
    y_true: PyTree,
    y_pred: PyTree,
    sample_weight: PyTree,
    context: Context,
) -> jax.Array:
    """Return this replica's share of a Keras loss.

    Values of rows that do not depend on other rows are added up here. Where they may, as in a
    contrastive loss, each replica computes the loss of all replicas' rows.

    Args:
        y_pred: predictions of this replica, shape `(rows, ...)`.

    Returns:
        A scalar; the sum over replicas (their mean, where `context.means`) is the loss that one
        device computes of all rows. With reduction `"none"`, the values of this replica's rows.
    """
    replica = context.replica
    if replica is None:
        return original(loss, y_true, y_pred, sample_weight)
    given = (y_true, y_pred, sample_weight)
    rows = common_rows(given)
    use = RowUse.APART if rows is None or _is_local(loss) else _row_use(original, loss, given, rows, replica)
    treatment = "with the rows of all replicas" if use is RowUse.MIXED else "added up over the replicas"
    note(f"loss {loss.name}", treatment, "`unisono.nn.local_rows`" if _is_local(loss) else use.value)
    if rows is not None and use is RowUse.MIXED:
        return _of_all_rows(original, loss, given, rows, context.means, replica)
    if loss.reduction in (None, "none"):
        return original(loss, *given)
    with _each_value(loss):
        values = original(loss, *given)
    if values.ndim == 0:
        return _scalar_share(original, loss, given, use, rows, context)
    if rows is not None and use is not RowUse.APART:
        return _of_all_rows(original, loss, given, rows, context.means, replica)
    share = jnp.sum(values)
    if loss.reduction in _MEANS:
        share = share / _divisor(original, loss, *given, values, replica)
    return share * _parts(context)


def _each_value(loss: keras.Loss) -> contextlib.AbstractContextManager[None]:
    """Let a loss return one value per example in a block.

    The user's own object, not a copy: `copy.copy` of a Keras object serializes it, which fails for classes
    that are not registered and drops arguments that `get_config` leaves out.
    """
    return set_attribute(loss, "reduction", "none")


def _parts(context: Context) -> int:
    """Return the factor of a replica's share of a sum: `fit` averages over replicas."""
    return context.replica.num_replicas_in_sync if context.means and context.replica else 1


def _row_use(
    original: LossCall, loss: keras.Loss, given: Given, rows: int, replica: ReplicaContext
) -> RowUse:
    """Return what a loss without reduction does with rows; `MIXED` also where one replica has none."""
    total = replica._engine.total(rows)
    empty_replicas = replica._engine.total(int(rows == 0))
    # The analysis compares two traces, of different numbers of rows; at least one row each.
    few, many = (rows, total) if 0 < rows < total else (max(1, total), 2 * max(1, total))

    def values(y_true: PyTree, y_pred: PyTree, sample_weight: PyTree) -> jax.Array:
        with _each_value(loss):
            return original(loss, y_true, y_pred, sample_weight)

    masks = masks_of(given[1])
    arrays = jax.tree.map(jnp.asarray, (*given, masks))
    try:
        with entered(None), DiscardingScope():
            uses = row_uses(lambda *a: values(*_masked(a)), arrays, few, many)
    except Exception as error:
        from unisono.training.rows._other_sizes import runs_with

        with entered(None), DiscardingScope():
            if runs_with(total, lambda *a: values(*_masked(a)), arrays):
                return RowUse.MIXED  # for example groups of rows, into which a replica's do not divide
        # For example a function that holds arrays of this replica's rows: it cannot see all rows.
        _LOG.warning(
            "The loss %r sees one replica's rows at a time: it could not be traced for %d rows (%s: %s).",
            loss.name, many, type(error).__name__, error,
        )  # fmt: skip
        return RowUse.APART
    scalars = {RowUse.MEAN, RowUse.SUM, RowUse.NONE}
    is_known = len({*uses}) == 1 and not (empty_replicas and scalars & {*uses})
    return uses[0] if is_known else RowUse.MIXED


def _scalar_share(
    original: LossCall, loss: keras.Loss, given: Given, use: RowUse, rows: int | None, context: Context
) -> jax.Array:
    """Return the share of a loss that is one number for all rows of a replica."""
    replica = context.replica
    if rows is None or replica is None or use not in (RowUse.MEAN, RowUse.SUM, RowUse.NONE):
        return original(loss, *given)
    with entered(None):
        value = original(loss, *given)
    if use is RowUse.SUM:
        return value * _parts(context)
    return value * (_parts(context) * rows / replica._engine.total(rows))


def _of_all_rows(
    original: LossCall, loss: keras.Loss, given: Given, rows: int, means: bool, replica: ReplicaContext
) -> jax.Array:
    """Return this replica's part of the loss of all replicas' rows, which each replica computes."""
    engine = replica._engine
    gathered = gather_rows((*given, masks_of(given[1])), engine, means=means)
    with entered(None):
        value = original(loss, *_masked(gathered))
    if value.ndim == 0:
        return value if means else value / engine.num_replicas
    # Without a reduction, a user adds up the values of a replica's rows.
    times, rest = divmod(value.shape[0], max(1, engine.total(rows)))
    return value if rest else own_rows(value, times * rows, engine)


def _divisor(
    original: LossCall,
    loss: keras.Loss,
    y_true: PyTree,
    y_pred: PyTree,
    sample_weight: PyTree,
    values: jax.Array,
    replica: ReplicaContext,
) -> int | jax.Array:
    """Return what Keras would divide by if it had all replicas' rows: examples, or weights."""
    weights = sample_weight if loss.reduction == "mean_with_sample_weight" else None
    if weights is None and not masks_of(y_pred):
        return max(1, replica._engine.total(values.size))
    ones = original(_CountingLoss(loss), y_true, y_pred, weights)
    total = replica.all_reduce(ReduceOp.SUM, jnp.sum(ones).astype(values.dtype))
    # Without a weight the sum is 0 too, and Keras returns 0 for it.
    return jnp.where(total == 0, 1, total)


class _MaskCarrier(keras.Layer):
    """Gives a tensor a mask, as Keras' own layers do."""

    def __init__(self, mask: jax.Array) -> None:
        super().__init__()
        self._mask = mask

    def call(self, inputs: jax.Array) -> jax.Array:
        """Return the tensor."""
        return inputs

    def compute_mask(self, inputs: jax.Array, previous_mask: jax.Array | None = None) -> jax.Array:
        """Return the mask."""
        return self._mask


def _masked(given: tuple[PyTree, PyTree, PyTree, dict[int, jax.Array]]) -> Given:
    """Return targets, predictions with their masks, and weights."""
    y_true, y_pred, sample_weight, masks = given
    leaves, structure = jax.tree.flatten(y_pred)
    for position, mask in masks.items():
        leaves[position] = _MaskCarrier(mask)(leaves[position])
    return y_true, jax.tree.unflatten(structure, leaves), sample_weight


class _CountingLoss(keras.Loss):
    """A loss of one for each example of another loss, so that weights and masks alone remain."""

    def __init__(self, loss: keras.Loss) -> None:
        super().__init__(reduction="none", dtype=loss.dtype)
        self._loss = loss

    def call(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        """Return ones in the shape of the other loss's values."""
        ones: jax.Array = keras.ops.ones_like(self._loss.call(y_true, y_pred))
        return ones


def synchronized_moments(
    inputs: jax.Array, axes: list[int], mask: jax.Array | None, replica: ReplicaContext
) -> tuple[jax.Array, jax.Array]:
    """Return mean and variance of the rows of all replicas, for a synchronized BatchNormalization.

    Two passes, as one device computes them: the squares of differences from the common mean. The mean of
    squares minus the square of the mean would need one message, and loses digits where the mean is large.

    Args:
        mask: truth values of shape `inputs.shape[:-1]`, or None.
    """
    axis = tuple(axes)
    if mask is None:
        weights = jnp.ones((), inputs.dtype)
        kept = math.prod(n for i, n in enumerate(inputs.shape) if i not in axis)
        count: int | jax.Array = max(1, replica._engine.total(inputs.size // max(1, kept)))
        total = replica.all_reduce(ReduceOp.SUM, jnp.sum(inputs, axis=axis))
    else:
        weights = jnp.broadcast_to(mask[..., None], inputs.shape).astype(inputs.dtype)
        sums = jnp.sum(inputs * weights, axis=axis), jnp.sum(weights, axis=axis)
        total, count = replica.all_reduce(ReduceOp.SUM, sums)
        count = jnp.maximum(count, 1)
    mean = total / count
    shape = [1 if i in axis else n for i, n in enumerate(inputs.shape)]
    squares = jnp.square(inputs - mean.reshape(shape)) * weights
    variance = replica.all_reduce(ReduceOp.SUM, jnp.sum(squares, axis=axis)) / count
    return mean, variance
