"""Keras losses as a replica must see them: divided by, and summed over, the rows of all replicas.

In a custom loop gradients are *summed* over the replicas, so a loss with a mean reduction
divides by the number of examples of all replicas (tf.distribute's rule). In `fit` gradients
are *averaged*, so that regularizers and losses that a user wrote with `mean` come out right
too; there the same loss is multiplied by the number of replicas.

Tests: tests/virtual/models/test_losses_and_metrics.py and tests/virtual/training/test_user_losses.py.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import keras

from unisono._context import Context, ReplicaContext, entered
from unisono._system._blocks import set_attribute
from unisono._types import PyTree
from unisono._values import ReduceOp
from unisono.training.replica._findings import note
from unisono.training.replica._rows import DiscardingScope, common_rows, gather_rows, own_rows
from unisono.training.rows._row_analysis import RowUse, row_uses

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
    total = replica.engine.total(rows)
    empty_replicas = replica.engine.total(int(rows == 0))
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
    return value * (_parts(context) * rows / replica.engine.total(rows))


def _of_all_rows(
    original: LossCall, loss: keras.Loss, given: Given, rows: int, means: bool, replica: ReplicaContext
) -> jax.Array:
    """Return this replica's part of the loss of all replicas' rows, which each replica computes."""
    engine = replica.engine
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
        return max(1, replica.engine.total(values.size))
    ones = original(_CountingLoss(loss), y_true, y_pred, weights)
    total = replica.all_reduce(ReduceOp.SUM, jnp.sum(ones).astype(values.dtype))
    # Without a weight the sum is 0 too, and Keras returns 0 for it.
    return jnp.where(total == 0, 1, total)


class _MaskProbe(keras.Layer):
    """Finds the mask of a tensor: Keras passes it to a layer that is called with the tensor."""

    supports_masking = True

    def call(self, inputs: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Keep the mask for `_masks`."""
        self.mask = mask
        return inputs


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


def masks_of(y_pred: PyTree) -> dict[int, jax.Array]:
    """Return the masks of the tensors of a structure, by their position."""
    found = {}
    for position, tensor in enumerate(jax.tree.leaves(y_pred)):
        probe = _MaskProbe()
        probe(tensor)
        if probe.mask is not None:
            found[position] = probe.mask
    return found


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
        count: int | jax.Array = max(1, replica.engine.total(inputs.size // max(1, kept)))
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
