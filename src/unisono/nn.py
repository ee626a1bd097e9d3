"""Losses of a replica, scaled so that their sum over the replicas is the loss of all examples.

Source: https://www.tensorflow.org/api_docs/python/tf/nn/compute_average_loss
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from unisono._context import ReplicaContext, get_replica_context
from unisono._errors import ContextError
from unisono.training.replica._losses import mark_local


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> Any:
    """Return the sum of the examples' losses divided by the number of examples of all replicas.

    Args:
        per_example_loss: shape `(rows,)` or `(rows, ...)`.
        sample_weight: weights, broadcast against the losses; None for ones.
        global_batch_size: what to divide by; by default the true number of rows of all
            replicas, also where they differ.

    Returns:
        A scalar, 0 for a replica without rows.

    Raises:
        ContextError: in cross-replica context.

    >>> float(compute_average_loss(jnp.array([1.0, 3.0])))
    2.0
    """
    replica = _replica("compute_average_loss")
    losses = jnp.asarray(per_example_loss)
    if sample_weight is not None:
        weights = jnp.asarray(sample_weight, losses.dtype)
        losses = losses * weights.reshape(weights.shape + (1,) * (losses.ndim - weights.ndim))
    if global_batch_size is None:
        global_batch_size = max(1, replica.engine.total(losses.shape[0] if losses.ndim else 1))
    return jnp.sum(losses) / global_batch_size


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """Return the sum of a regularization loss divided by the number of replicas.

    Args:
        regularization_loss: an array, or a list of scalars such as `model.losses`.

    Raises:
        ContextError: in cross-replica context.

    >>> float(scale_regularization_loss(jnp.array([1.0, 2.0])))
    3.0
    """
    replica = _replica("scale_regularization_loss")
    values = regularization_loss if isinstance(regularization_loss, list) else [regularization_loss]
    return sum((jnp.sum(v) for v in values), jnp.zeros(())) / replica.num_replicas_in_sync


def local_rows(loss: Any) -> Any:
    """Let a loss see the rows of one replica only, as tf.distribute has it, and return it.

    A `keras.Loss`, or a function given to `compile`, in which rows meet is computed of all
    replicas' rows, so that the numbers are those of one device. A contrastive loss marked by this
    compares a replica's rows with each other alone: nothing is gathered, and the numbers depend
    on the number of replicas.

    Args:
        loss: a `keras.Loss`, or a function of targets and predictions.

    Returns:
        The loss that was given.

    >>> loss = local_rows(lambda y, p: (p @ p.T).mean())
    """
    mark_local(loss)
    return loss


def _replica(what: str) -> ReplicaContext:
    context = get_replica_context()
    if context is None:
        raise ContextError(
            f"`{what}` must be called in a replica. Received: a call in cross-replica context. "
            "Call it inside the function given to `strategy.run`."
        )
    return context
