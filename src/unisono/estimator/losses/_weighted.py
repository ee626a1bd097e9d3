"""The sum of weighted elements of a loss, by how many there are on all replicas; the losses of a model_fn.

Tests: tests/unit/estimator/test_losses.py, tests/virtual/estimator/test_replica_losses.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import ReplicaContext
from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono._types import ArrayLike, PyTree
from unisono._values import ReduceOp
from unisono.estimator._collections import LOSSES, current_collections, required_collections
from unisono.estimator._docstrings import Texts
from unisono.spi import running_step

#: The texts for arguments of losses.
TEXTS = Texts(
    {
        "labels": "float array of any shape; the targets.",
        "predictions": "float array of the shape of `labels`; what the model predicts.",
        "logits": "float array of the shape of `labels`; what the model predicts; above 0 for the class 1.",
        "weights": "number, or float array with the axes of the elements of the loss, each of the same size "
        "or 1; the factors of the elements.",
        "scope": "string or None; has no effect.",
        "loss_collection": "string; the collection of the model_fn that the loss joins; None for none.",
        "reduction": "one of the values of `Reduction`; how the elements become one number.",
    },
    "The loss, a float array of shape `()`, or with `Reduction.NONE` the weighted elements; in a replica, "
    "its part of the loss of all replicas.",
    {
        "InvalidArgumentError": "the labels or the predictions are None, the shapes do not fit each other, "
        "or `reduction` is not one of the values of `Reduction`."
    },
)


class Reduction:
    """How the elements of a loss become one number.

    >>> Reduction.SUM_OVER_NONZERO_WEIGHTS == Reduction.SUM_BY_NONZERO_WEIGHTS
    True
    """

    NONE = "none"
    SUM = "weighted_sum"
    SUM_OVER_BATCH_SIZE = "weighted_sum_over_batch_size"
    MEAN = "weighted_mean"
    SUM_BY_NONZERO_WEIGHTS = "weighted_sum_by_nonzero_weights"
    SUM_OVER_NONZERO_WEIGHTS = SUM_BY_NONZERO_WEIGHTS

    @classmethod
    def all(cls) -> tuple[str, ...]:
        """Return all values.

        Returns:
            A tuple of strings.
        """
        return (cls.NONE, cls.SUM, cls.MEAN, cls.SUM_OVER_BATCH_SIZE, cls.SUM_BY_NONZERO_WEIGHTS)

    @classmethod
    def validate(cls, key: str) -> None:
        """Check that a string is one of the values.

        Args:
            key: string.

        Raises:
            InvalidArgumentError: `key` is not one of `Reduction.all()`.
        """
        if key not in cls.all():
            raise InvalidArgumentError(f"`reduction` must be one of {cls.all()}. Received: {key!r}.")


@TEXTS.with_texts(losses="float array of any shape; the elements.")
def compute_weighted_loss(
    losses: ArrayLike,
    weights: ArrayLike = 1.0,
    scope: str | None = None,
    loss_collection: str | None = LOSSES,
    reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> jax.Array:
    """Return the weighted loss of elements.

    >>> float(compute_weighted_loss([1.0, 2.0, 6.0], [1.0, 1.0, 0.0]))
    1.5
    """
    Reduction.validate(reduction)
    values = keras.ops.convert_to_tensor(losses)
    given = jnp.asarray(weights)
    check_weights(given, values)
    dtype, wide = values.dtype, jnp.promote_types(values.dtype, jnp.float32)
    values, given = values.astype(wide), given.astype(wide)
    weighted: jax.Array = values * given
    if reduction == Reduction.NONE:
        loss = weighted
    else:
        loss = sum_of_part(weighted)
        if reduction == Reduction.MEAN:
            loss = divide(loss, _over_replicas(jnp.broadcast_to(given, values.shape)))
        elif reduction == Reduction.SUM_OVER_BATCH_SIZE:
            loss = loss / max(1, _total_size(values))
        elif reduction == Reduction.SUM_BY_NONZERO_WEIGHTS:
            loss = divide(loss, _number_present(values, weights))
        loss = loss * parts()
    result: jax.Array = loss.astype(dtype)
    add_loss(result, loss_collection)
    return result


#: The texts for arguments of losses whose elements `compute_weighted_loss` adds up.
ELEMENT_TEXTS = dataclasses.replace(TEXTS, options_of=compute_weighted_loss)


class LossOptions(TypedDict, total=False):
    """The arguments with which losses end."""

    scope: str | None
    loss_collection: str | None
    reduction: str


def check_weights(weights: jax.Array, values: jax.Array) -> None:
    """Raise an error for weights that do not fit."""
    pairs = zip(weights.shape, values.shape, strict=False)
    fits = weights.ndim == values.ndim and all(w in (1, v) for w, v in pairs)
    if weights.ndim and not fits:
        raise InvalidArgumentError(
            "`weights` must be a number, or have the axes of the values, each of the same size or 1. "
            f"Received: shape {weights.shape} for values of shape {values.shape}. Write `weights[:, None]` "
            "or the like."
        )


# --- replicas ----------------------------------------------------------------------------------------------


def several_replicas() -> ReplicaContext | None:
    """Return the replica that runs the code, if there are several."""
    replica = running_step().replica
    return replica if replica is not None and replica.num_replicas_in_sync > 1 else None


def parts() -> int:
    """Return the factor of a replica's share: where gradients are averaged, a sum needs it."""
    replica = several_replicas()
    return 1 if replica is None or not running_step().averages else replica.num_replicas_in_sync


def _is_empty() -> bool:
    replica = several_replicas()
    return replica is not None and replica._engine.is_empty


def sum_of_part(values: jax.Array) -> jax.Array:
    """Return the sum of a replica's elements; 0 for one without data, whose arrays are stand-ins."""
    # Not a constant: the losses of all replicas depend on the same variables.
    return jnp.sum(jnp.where(False, values, 0) if _is_empty() else values)


def _over_replicas(values: jax.Array) -> jax.Array:
    """Return the sum of the elements of all replicas."""
    part, replica = sum_of_part(values), several_replicas()
    return part if replica is None else replica.all_reduce(ReduceOp.SUM, part)


def _total_size(values: jax.Array) -> int:
    """Return the number of elements of all replicas, which is known while tracing."""
    size, replica = (0 if _is_empty() else values.size), several_replicas()
    return size if replica is None else replica._engine.total(size)


def _number_present(values: jax.Array, weights: ArrayLike) -> int | jax.Array:
    """Return how many elements of all replicas have a weight that is not zero."""
    if not np.ndim(weights) and not isinstance(weights, jax.Array):
        return _total_size(values) if weights != 0 else 0
    present = jnp.broadcast_to(jnp.asarray(weights) != 0, values.shape)
    return _over_replicas(present.astype(values.dtype))


def divide(value: jax.Array, number: int | jax.Array) -> jax.Array:
    """Return a quotient, or 0 where the divisor is 0."""
    if isinstance(number, int):
        return value / number if number else jnp.zeros_like(value)
    return jnp.where(number == 0, 0, value / jnp.where(number == 0, 1, number))


def add_loss(loss: PyTree, loss_collection: str | None = LOSSES) -> None:
    """Let a loss join those that `get_total_loss` adds up; outside of a model_fn, do nothing.

    Args:
        loss: float array of shape `()`; of any shape in a collection that is not added up.
        loss_collection: string; the collection of the model_fn that the loss joins; None for none.
    """
    collections = current_collections()
    if collections is not None and loss_collection is not None:
        collections.add(loss_collection, loss)


# --- the losses of a model_fn -------------------------------------------------------------------------------

_SUM_TEXTS = Texts(
    {
        "scope": "must be None; losses have no names by which they could be chosen.",
        "loss_collection": "string; the collection of losses of the model_fn.",
        "add_regularization_losses": "bool; whether the losses of regularizers are added, too.",
        "name": "string; has no effect.",
    },
    "The sum, a float array of shape `()`; in a replica, the replica's part of it.",
    {"ContextError": "the call is outside of a model_fn.", "UnsupportedError": "`scope` is not None."},
)


@_SUM_TEXTS.with_texts(returns="The losses, float arrays of shape `()`, in the order of their computation.")
def get_losses(scope: str | None = None, loss_collection: str = LOSSES) -> list[Any]:
    """Return the losses that the model_fn has computed so far."""
    _check_scope(scope)
    return list(required_collections("get_losses").members.get(loss_collection, ()))


@_SUM_TEXTS.with_texts(
    returns="Float arrays of shape `()`, one for each regularizer; in a replica, its part of each."
)
def get_regularization_losses(scope: str | None = None) -> list[jax.Array]:
    """Return the losses of the regularizers of the model_fn's `tf.layers`."""
    _check_scope(scope)
    losses = required_collections("get_regularization_losses").regularization_losses()
    # Each replica has all of it: where gradients are summed, that would be once too often for each.
    replica = several_replicas()
    share = parts() / (1 if replica is None else replica.num_replicas_in_sync)
    return losses if share == 1 else [loss * share for loss in losses]


@_SUM_TEXTS
def get_regularization_loss(scope: str | None = None, name: str = "total_regularization_loss") -> jax.Array:
    """Return the sum of the losses of the regularizers of the model_fn's `tf.layers`; 0 for none."""
    return sum(get_regularization_losses(scope), jnp.zeros(()))


@_SUM_TEXTS.with_texts(
    raises={**_SUM_TEXTS.raises, "InvalidArgumentError": "the model_fn has no loss so far."}
)
def get_total_loss(
    add_regularization_losses: bool = True, name: str = "total_loss", scope: str | None = None
) -> jax.Array:
    """Return the sum of the losses that the model_fn has computed so far."""
    losses = get_losses(scope)
    if add_regularization_losses:
        losses += get_regularization_losses(scope)
    if not losses:
        raise InvalidArgumentError("There must be a loss to add up. Received: a model_fn without any so far.")
    total: jax.Array = sum(losses[1:], losses[0])
    return total


def _check_scope(scope: object) -> None:
    if scope is not None:
        raise UnsupportedError(
            f"Losses have no names by which they could be chosen. Received: scope={scope!r}. Choose from the "
            "list that `get_losses()` returns, or give losses a `loss_collection` of their own."
        )
