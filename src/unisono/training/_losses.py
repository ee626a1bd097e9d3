"""Keras losses and optimizers as a replica must see them: divided by, and summed over, all replicas.

In a custom loop gradients are *summed* over the replicas, so a loss with a mean reduction
divides by the number of examples of all replicas (tf.distribute's rule). In `fit` gradients
are *averaged*, so that regularizers and losses that a user wrote with `mean` come out right
too; there the same loss is multiplied by the number of replicas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import keras

from unisono._context import Context, ReplicaContext
from unisono._values import ReduceOp

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def replica_loss(
    original: Callable[..., Any], loss: Any, y_true: Any, y_pred: Any, sample_weight: Any, context: Context
) -> Any:
    """Return this replica's share of a Keras loss.

    Args:
        original: Keras' own `Loss.__call__`.
        loss: the loss object.
        y_true: targets of this replica.
        y_pred: predictions of this replica, shape `(rows, ...)`.
        sample_weight: weights, or None.
        context: the replica's context.

    Returns:
        A scalar; the sum over replicas (their mean, where `context.means`) is the loss that one
        device computes of all rows. With reduction `"none"`, what Keras returns.
    """
    replica = context.replica
    if replica is None or loss.reduction in (None, "none"):
        return original(loss, y_true, y_pred, sample_weight)
    with _without_reduction(loss):
        values = original(loss, y_true, y_pred, sample_weight)
    if values.ndim == 0:
        return original(loss, y_true, y_pred, sample_weight)
    share = jnp.sum(values)
    if loss.reduction in _MEANS:
        share = share / _divisor(original, loss, y_true, y_pred, sample_weight, values, replica)
    if context.means:
        share = share * replica.num_replicas_in_sync
    return share


def _divisor(
    original: Callable[..., Any],
    loss: Any,
    y_true: Any,
    y_pred: Any,
    sample_weight: Any,
    values: Any,
    replica: ReplicaContext,
) -> Any:
    """What Keras would divide by, had it all replicas' rows: examples, or weights."""
    weights = sample_weight if loss.reduction == "mean_with_sample_weight" else None
    if weights is None and not _has_mask(y_pred):
        return max(1, replica.engine.total(values.size))
    ones = original(_CountingLoss(loss), y_true, y_pred, weights)
    total = replica.all_reduce(ReduceOp.SUM, jnp.sum(ones).astype(values.dtype))
    return jnp.where(total == 0, 1, total)


class _MaskProbe(keras.Layer):
    """Asks Keras for the mask of a tensor: a layer is told the mask of what it is called with."""

    supports_masking = True

    def call(self, inputs: Any, mask: Any = None) -> Any:
        """Keep the mask for `_has_mask`."""
        self.has_mask = mask is not None
        return inputs


def _has_mask(y_pred: Any) -> bool:
    probe = _MaskProbe()
    probe(y_pred)
    return bool(probe.has_mask)


@contextlib.contextmanager
def _without_reduction(loss: Any) -> Iterator[None]:
    """Let a loss return one value per example.

    The user's own object, not a copy: `copy.copy` of a Keras object serializes it, which fails for classes
    that are not registered and drops arguments that `get_config` leaves out.
    """
    reduction = loss.reduction
    loss.reduction = "none"
    try:
        yield
    finally:
        loss.reduction = reduction


class _CountingLoss(keras.Loss):
    """A loss of one for each example of another loss, so that weights and masks alone remain."""

    def __init__(self, loss: Any) -> None:
        super().__init__(reduction="none", dtype=loss.dtype)
        self._loss = loss

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return ones in the shape of the other loss's values."""
        return keras.ops.ones_like(self._loss.call(y_true, y_pred))


def aggregate_gradients(grads: list[Any], context: Context) -> list[Any]:
    """Return the gradients that an optimizer must apply, equal on all replicas.

    Args:
        grads: this replica's; None for a variable without one.
        context: the replica's context.
    """
    replica = context.replica
    if replica is None or replica.num_replicas_in_sync == 1:
        return grads
    present = [g for g in grads if g is not None]
    op = ReduceOp.MEAN if context.means else ReduceOp.SUM
    reduced = iter(replica.all_reduce(op, present))
    return [None if g is None else next(reduced) for g in grads]


def synchronized_moments(inputs: Any, axes: list[int], mask: Any, replica: ReplicaContext) -> tuple[Any, Any]:
    """Return mean and variance of the rows of all replicas, for a synchronized BatchNormalization.

    Two passes, as one device computes them: the squares of differences from the common mean.

    Args:
        inputs: array of this replica.
        axes: the axes to reduce, the batch's among them.
        mask: truth values of shape `inputs.shape[:-1]`, or None.
        replica: this replica.
    """
    axis = tuple(axes)
    if mask is None:
        weights = jnp.ones((), inputs.dtype)
        count: Any = max(1, replica.engine.total(inputs.size // max(1, _kept_size(inputs, axes))))
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


def _kept_size(inputs: Any, axes: list[int]) -> int:
    """The number of values that remain after a reduction over `axes`."""
    kept = 1
    for i, n in enumerate(inputs.shape):
        kept *= 1 if i in axes else n
    return kept
