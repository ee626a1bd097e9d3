"""Scale a replica's losses so that their sum over the replicas is the mean over all examples.

Source: https://www.tensorflow.org/api_docs/python/tf/nn/compute_average_loss

Tests: tests/virtual/models/test_losses_and_metrics.py, tests/virtual/training/test_user_losses.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import keras

from unisono._context import ReplicaContext, get_replica_context
from unisono._errors import ContextError
from unisono._types import ArrayLike
from unisono.training.replica._losses import mark_local

Loss = TypeVar("Loss", bound="keras.Loss | Callable[..., ArrayLike]")


def compute_average_loss(
    per_example_loss: ArrayLike, sample_weight: ArrayLike = None, global_batch_size: ArrayLike = None
) -> jax.Array:
    """Return the sum of the examples' losses divided by the number of examples of all replicas.

    Args:
        per_example_loss: losses of shape `(rows,)` or `(rows, ...)`.
        sample_weight: weights that broadcast to the losses; None means ones.
        global_batch_size: the divisor; by default the actual number of rows of all replicas,
            also where replicas have different numbers of rows.

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
        # Weights belong to the first axes, the examples; NumPy would align them with the last ones.
        losses = losses * weights.reshape(weights.shape + (1,) * (losses.ndim - weights.ndim))
    if global_batch_size is None:
        # At least 1: where no replica has rows, the loss is 0 and not NaN.
        global_batch_size = max(1, replica.engine.total(losses.shape[0] if losses.ndim else 1))
    average: jax.Array = jnp.sum(losses) / global_batch_size
    return average


def scale_regularization_loss(regularization_loss: ArrayLike) -> jax.Array:
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
    # The start value makes an array of the empty list that a model without regularizers has.
    return sum((jnp.sum(v) for v in values), jnp.zeros(())) / replica.num_replicas_in_sync


def local_rows(loss: Loss) -> Loss:
    """Mark a loss that is computed from the rows of one replica only, as in tf.distribute, and return it.

    Where the value of a `keras.Loss`, or of a function given to `compile`, combines several rows, it is
    computed from the rows of all replicas, so that the numbers are those of one device. A contrastive
    loss with this mark compares only the rows of the same replica: nothing is gathered, and the
    numbers depend on the number of replicas.

    Args:
        loss: a `keras.Loss`, or a function of targets and predictions.

    Returns:
        The same loss.

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
