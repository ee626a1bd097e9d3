"""The losses that a model_fn has computed, and their sum.

Tests: tests/unit/estimator/test_losses.py, tests/virtual/estimator/test_replica_losses.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono.estimator._collections import LOSSES, required_collections
from unisono.estimator._docstrings import Texts
from unisono.estimator.losses._weighted import parts, several_replicas

_TEXTS = Texts(
    {
        "scope": "must be None; losses have no names by which they could be chosen.",
        "loss_collection": "string; the collection of losses of the model_fn.",
        "add_regularization_losses": "bool; whether the losses of regularizers are added, too.",
        "name": "string; has no effect.",
    },
    "The sum, a float array of shape `()`; in a replica, the replica's part of it.",
    {"ContextError": "the call is outside of a model_fn.", "UnsupportedError": "`scope` is not None."},
)


@_TEXTS.with_texts(returns="The losses, float arrays of shape `()`, in the order of their computation.")
def get_losses(scope: str | None = None, loss_collection: str = LOSSES) -> list[Any]:
    """Return the losses that the model_fn has computed so far."""
    _check_scope(scope)
    return list(required_collections("get_losses").members.get(loss_collection, ()))


@_TEXTS.with_texts(
    returns="Float arrays of shape `()`, one for each regularizer; in a replica, its part of each."
)
def get_regularization_losses(scope: str | None = None) -> list[jax.Array]:
    """Return the losses of the regularizers of the model_fn's `tf.layers`."""
    _check_scope(scope)
    found = required_collections("get_regularization_losses").regularization_losses()
    # Each replica has all of it: where gradients are summed, that would be once too often for each.
    replica = several_replicas()
    share = parts() / (1 if replica is None else replica.num_replicas_in_sync)
    return found if share == 1 else [loss * share for loss in found]


@_TEXTS
def get_regularization_loss(scope: str | None = None, name: str = "total_regularization_loss") -> jax.Array:
    """Return the sum of the losses of the regularizers of the model_fn's `tf.layers`; 0 for none."""
    return sum(get_regularization_losses(scope), jnp.zeros(()))


@_TEXTS.with_texts(raises={**_TEXTS.raises, "InvalidArgumentError": "the model_fn has no loss so far."})
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
