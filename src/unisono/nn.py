"""Losses of a replica that add up to the mean over all examples, and rows of divided variables.

Sources: https://www.tensorflow.org/api_docs/python/tf/nn/compute_average_loss,
https://www.tensorflow.org/api_docs/python/tf/nn/embedding_lookup

Tests: tests/virtual/models/test_losses_and_metrics.py, tests/virtual/training/test_user_losses.py,
tests/virtual/strategies/test_sharded_variable.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import ReplicaContext, current, get_replica_context
from unisono._errors import ContextError, InvalidArgumentError
from unisono._types import ArrayLike
from unisono.training._variable_calls import rows_handle_of
from unisono.training.replica._losses import mark_local

__all__ = [
    "compute_average_loss",
    "embedding_lookup",
    "local_rows",
    "scale_regularization_loss",
]


def __dir__() -> list[str]:
    return __all__


_LOG = logging.getLogger("unisono")
_said: list[str] = []

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
        A scalar, 0 for a replica without rows. In a step of `fit`, which averages gradients and losses over
        the replicas, the sum is multiplied by their number: the numbers are those of one device.

    Raises:
        ContextError: in cross-replica context.
        InvalidArgumentError: the batch size is not positive.

    >>> float(compute_average_loss(jnp.array([1.0, 3.0])))
    2.0
    """
    replica = _replica("compute_average_loss")
    losses = jnp.asarray(per_example_loss)
    if sample_weight is not None:
        weights = jnp.asarray(sample_weight, losses.dtype)
        # Weights belong to the first axes, the examples; NumPy would align them with the last ones.
        losses = losses * weights.reshape(weights.shape + (1,) * (losses.ndim - weights.ndim))
    if isinstance(global_batch_size, (int, float)) and global_batch_size <= 0:
        raise InvalidArgumentError(
            "`global_batch_size` must be the number of rows of all replicas. Received: "
            f"{global_batch_size}. Leave it out: the rows are counted."
        )
    if isinstance(global_batch_size, int) and losses.ndim:
        _warn_of_small_batch(global_batch_size, replica._engine.total(losses.shape[0]), replica)
    if global_batch_size is None:
        # At least 1: where no replica has rows, the loss is 0 and not NaN.
        global_batch_size = max(1, replica._engine.total(losses.shape[0] if losses.ndim else 1))
    average: jax.Array = jnp.sum(losses) / global_batch_size * _averaged(replica)
    return average


def _warn_of_small_batch(given: int, rows: object, replica: ReplicaContext) -> None:
    """Warn, once in a program, where losses are divided by fewer rows than all replicas have.

    More is usual: the last batch of an epoch has fewer rows than the others.
    """
    if _said or isinstance(rows, jax.core.Tracer) or given >= (count := int(np.asarray(rows))):
        return
    _said.append("small batch")
    _LOG.warning(
        "`global_batch_size` must be the number of rows of all replicas. Received: %d, for a batch of %d "
        "rows on %d replicas: the loss and its gradients are %.3g times as large as on one device. Write "
        "`global_batch_size=%d`, or leave it out: the rows are counted.",
        given, count, replica.num_replicas_in_sync, count / given, count,
    )  # fmt: skip


def scale_regularization_loss(regularization_loss: ArrayLike) -> jax.Array:
    """Return the sum of a regularization loss divided by the replicas; undivided in a step of `fit`.

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
    total = sum((jnp.sum(v) for v in values), jnp.zeros(()))
    return total * _averaged(replica) / replica.num_replicas_in_sync


def _averaged(replica: ReplicaContext) -> int:
    """Return over how many replicas gradients and losses are averaged; 1 where they are summed."""
    context = current()
    return replica.num_replicas_in_sync if context is not None and context.means else 1


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


def embedding_lookup(
    params: ArrayLike, ids: ArrayLike, max_norm: float | None = None, name: str | None = None
) -> jax.Array:
    """Return rows of a table, as TensorFlow's function of this name.

    Outside of a step, of a table on parameter servers only these rows travel.

    Args:
        params: a variable or array of at least one axis; or a list of parts of one, in the order of rows,
            such as `ShardedVariable.variables`.
        ids: whole numbers of any shape.
        max_norm: the largest norm of a returned row; larger ones are scaled down. None for any.
        name: accepted for TensorFlow's signature.

    Returns:
        An array of shape `ids.shape + params.shape[1:]`.

    Raises:
        InvalidArgumentError: an id is no row, where the ids are known; or they are no whole numbers.

    >>> embedding_lookup(np.eye(3), [[2, 0]]).tolist()
    [[[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]]
    """
    if isinstance(params, (list, tuple)):
        params = jnp.concatenate([jnp.asarray(part) for part in params])
    table = params if isinstance(params, keras.Variable) else jnp.asarray(params)
    chosen = jnp.asarray(ids)
    _check_ids(chosen, tuple(table.shape))
    held = rows_handle_of(table) if isinstance(table, keras.Variable) else None
    if held is None or isinstance(chosen, jax.core.Tracer):
        rows: jax.Array = keras.ops.take(table, chosen, axis=0)
    else:
        indices = np.asarray(chosen)
        found = held.take(indices.reshape(-1))
        rows = jnp.asarray(found.reshape(*indices.shape, *found.shape[1:]))
    if max_norm is None:
        return rows
    axes = tuple(range(chosen.ndim, rows.ndim))
    norms = jnp.sqrt(jnp.sum(jnp.square(rows), axes, keepdims=True))
    clipped: jax.Array = rows * max_norm / jnp.maximum(norms, max_norm)
    return clipped


def _check_ids(ids: jax.Array, shape: tuple[int, ...]) -> None:
    if not shape or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise InvalidArgumentError(
            "Rows are looked up in a table with at least one axis, by whole numbers. Received: a table of "
            f"shape {shape} and ids of dtype {ids.dtype}."
        )
    if isinstance(ids, jax.core.Tracer) or not ids.size:
        return
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= shape[0]:
        raise InvalidArgumentError(
            f"Ids must be rows of the table, from 0 to {shape[0] - 1}. Received: ids from {lowest} to "
            f"{highest}."
        )


def _replica(what: str) -> ReplicaContext:
    context = get_replica_context()
    if context is None:
        raise ContextError(
            f"`{what}` must be called in a replica. Received: a call in cross-replica context. "
            "Call it inside the function given to `strategy.run`."
        )
    return context
