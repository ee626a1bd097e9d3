"""Losses that layers add with `add_loss`, or that a model computes itself, over all replicas in `fit`.

Tests: tests/virtual/training/test_user_losses.py.
"""

from __future__ import annotations

import logging
import weakref

import jax
import jax.numpy as jnp
import keras

from unisono._context import Context, entered
from unisono._types import PyTree
from unisono.step._keras_internals import (
    adds_losses,
    all_layers,
    loss_of_step,
    replace_losses,
    replaced_losses,
    takes_training,
)
from unisono.training.replica._row_analysis import RowUse, row_uses
from unisono.training.replica._rows import DiscardingScope, rows_of

_LOG = logging.getLogger("unisono")

#: Models whose own loss was analyzed: the warning is for the first step.
_CHECKED: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def added_losses(model: keras.Model, x: PyTree, training: bool, context: Context) -> list[jax.Array] | None:
    """Return a model's additional losses as a replica in `fit` must count them; None for no change.

    `fit` averages gradients over the replicas, which is right for a mean over rows and for what does not
    depend on rows. A sum over rows is multiplied by the number of replicas.

    Args:
        model: the model, after its forward pass.
    """
    losses, replica = list(model.losses), context.replica
    regularized = sum(v.regularizer is not None for v in model.trainable_variables)
    rows = rows_of(x)
    if replica is None or replica.num_replicas_in_sync == 1 or len(losses) <= regularized or not rows:
        return None
    total = replica.engine.total(rows)
    try:
        uses = _uses(model, x, training, rows, total)
    except Exception:  # a user's layer may do anything with another number of rows
        uses = [RowUse.MIXED] * len(losses)
    if len(uses) != len(losses):
        uses = [RowUse.MIXED] * len(losses)
    if RowUse.MIXED in uses:
        _warn(model)
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


def check_own_loss(model: keras.Model, arguments: tuple[PyTree, ...], context: Context) -> None:
    """Warn where the loss of an overridden `compute_loss` may depend on the number of replicas."""
    replica, rows = context.replica, rows_of(arguments[:-1])
    if replica is None or replica.num_replicas_in_sync == 1 or not rows or model in _CHECKED:
        return
    _CHECKED.add(model)

    def loss(*trees: PyTree) -> jax.Array:
        with entered(None), DiscardingScope():
            return loss_of_step(model, *trees, training=arguments[-1])

    shapes = jax.tree.map(jnp.asarray, arguments[:-1])
    try:
        (use,) = row_uses(loss, shapes, rows, replica.engine.total(rows))
    except Exception:  # a user's `compute_loss` may do anything with another number of rows
        use = RowUse.MIXED
    if use not in (RowUse.MEAN, RowUse.NONE):
        _LOG.warning(
            "What %s.compute_loss returns counts as the mean of its values on the replicas: it could not be "
            "shown to be a mean over rows, so another number of replicas may give other numbers. Write a "
            "`keras.Loss` or a function and pass it to `compile(loss=...)`: it gets the rows of all replicas "
            "where its value for one row depends on others.",
            type(model).__name__,
        )  # fmt: skip


def _warn(model: keras.Model) -> None:
    layers = [layer.name for layer in all_layers(model) if adds_losses(layer) and layer is not model]
    _LOG.warning(
        "A loss that is added by %s counts as the mean of its values on the replicas: it could not be shown "
        "to be a mean or a sum over rows, so another number of replicas may give other numbers.",
        " or ".join(sorted(layers)[:3]) or model.name,
    )
