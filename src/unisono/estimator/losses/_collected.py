"""The losses that a model_fn has computed, and their sum.

Tests: tests/unit/estimator/test_losses.py, tests/virtual/estimator/test_replica_losses.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono._types import UserValue
from unisono.estimator._collections import LOSSES, required_collections
from unisono.estimator.losses._weighted import parts, several_replicas


def get_losses(scope: str | None = None, loss_collection: str = LOSSES) -> list[Any]:
    """Return the losses that the model_fn has computed so far.

    Args:
        scope: must be None, here and below: losses have no names.
        loss_collection: which.

    Raises:
        ContextError: outside of a model_fn.
        UnsupportedError: there is a scope.
    """
    _check_scope(scope)
    return list(required_collections("get_losses").members.get(loss_collection, ()))


def get_regularization_losses(scope: str | None = None) -> list[jax.Array]:
    """Return the losses of the regularizers of the model_fn's `tf.layers`.

    Args:
        scope: must be None.

    Raises:
        ContextError: outside of a model_fn.
    """
    _check_scope(scope)
    found = required_collections("get_regularization_losses").regularization_losses()
    # Each replica has all of it: where gradients are summed, that would be once too often for each.
    replica = several_replicas()
    share = parts() / (1 if replica is None else replica.num_replicas_in_sync)
    return found if share == 1 else [loss * share for loss in found]


def get_regularization_loss(scope: str | None = None, name: str = "total_regularization_loss") -> jax.Array:
    """Return the sum of the losses of the regularizers of the model_fn's `tf.layers`; 0 for none.

    Args:
        scope: must be None.
        name: is not used.

    Raises:
        ContextError: outside of a model_fn.
    """
    return sum(get_regularization_losses(scope), jnp.zeros(()))


def get_total_loss(
    add_regularization_losses: bool = True, name: str = "total_loss", scope: str | None = None
) -> jax.Array:
    """Return the sum of the losses that the model_fn has computed so far.

    Args:
        add_regularization_losses: whether those of regularizers count.
        name: is not used.
        scope: must be None.

    Raises:
        ContextError: outside of a model_fn.
        InvalidArgumentError: there is no loss.
    """
    losses = get_losses(scope)
    if add_regularization_losses:
        losses += get_regularization_losses(scope)
    if not losses:
        raise InvalidArgumentError("There must be a loss to add up. Received: a model_fn without any so far.")
    total: jax.Array = sum(losses[1:], losses[0])
    return total


def _check_scope(scope: UserValue) -> None:
    if scope is not None:
        raise UnsupportedError(
            f"Losses have no names by which they could be chosen. Received: scope={scope!r}. Choose from the "
            "list that `get_losses()` returns, or give losses a `loss_collection` of their own."
        )
