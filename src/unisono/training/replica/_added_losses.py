"""Losses that layers add with `add_loss`, or that a model computes itself, over all replicas in `fit`.

Tests: tests/virtual/training/test_user_losses.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras

from unisono._context import Context, entered
from unisono._types import PyTree
from unisono.step._keras_internals import (
    replace_losses,
    replaced_losses,
    takes_training,
)
from unisono.training.replica._rows import DiscardingScope, rows_of
from unisono.training.rows._row_analysis import RowUse, row_uses


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
    total = replica.engine.total(rows)
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
