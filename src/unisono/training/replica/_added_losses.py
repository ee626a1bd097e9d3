"""Losses that layers add with `add_loss`, or that a model computes itself, over all replicas in `fit`."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import jax
import jax.numpy as jnp

from unisono._context import Context, entered
from unisono.step._keras_internals import (
    adds_losses,
    all_layers,
    loss_of_step,
    replace_losses,
    replaced_losses,
    takes_training,
)
from unisono.training.replica._row_analysis import RowUse, row_uses
from unisono.training.replica._rows import Aside, rows_of

_LOG = logging.getLogger("unisono")

#: Models whose own loss was looked at.
_CHECKED: weakref.WeakSet[Any] = weakref.WeakSet()


def added_losses(model: Any, x: Any, training: bool, context: Context) -> list[Any] | None:
    """Return a model's additional losses as a replica in `fit` must count them; None for as they are.

    Gradients are averaged over the replicas there, which is right for a mean over rows and for what
    does not depend on rows. A sum over rows is multiplied by the number of replicas.

    Args:
        model: the model, after its forward pass.
        x: its inputs, with this replica's rows.
        training: as in the forward pass.
        context: the replica's.
    """
    losses, replica = list(model.losses), context.replica
    regularized = sum(v.regularizer is not None for v in model.trainable_variables)
    rows = rows_of(x)
    if replica is None or replica.num_replicas_in_sync == 1 or len(losses) <= regularized or not rows:
        return None
    total = replica.engine.total(rows)
    try:
        uses = _uses(model, x, training, rows, total)
    except Exception:
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


def _uses(model: Any, x: Any, training: bool, rows: int, total: int) -> list[RowUse]:
    kwargs = {"training": training} if takes_training(model) else {}

    def losses(x: Any) -> list[Any]:
        with entered(None), Aside(collect_losses=True):
            model(x, **kwargs)
            return [jnp.sum(loss) for loss in model.losses]

    override = replaced_losses(model)
    replace_losses(model, [])
    try:
        return row_uses(losses, (jax.tree.map(jnp.asarray, x),), rows, total)
    finally:
        replace_losses(model, override)


def check_own_loss(model: Any, arguments: tuple[Any, ...], context: Context) -> None:
    """Warn where the loss of an overridden `compute_loss` may depend on the number of replicas.

    Args:
        model: the model, whose class overrides `compute_loss`.
        arguments: of `compute_loss`, with this replica's rows.
        context: the replica's.
    """
    replica, rows = context.replica, rows_of(arguments[:-1])
    if replica is None or replica.num_replicas_in_sync == 1 or not rows or model in _CHECKED:
        return
    _CHECKED.add(model)

    def loss(*trees: Any) -> Any:
        with entered(None), Aside():
            return loss_of_step(model, *trees, training=arguments[-1])

    shapes = jax.tree.map(jnp.asarray, arguments[:-1])
    try:
        (use,) = row_uses(loss, shapes, rows, replica.engine.total(rows))
    except Exception:
        use = RowUse.MIXED
    if use not in (RowUse.MEAN, RowUse.NONE):
        _LOG.warning(
            "What %s.compute_loss returns counts as the mean of its values on the replicas: it could not be "
            "shown to be a mean over rows, so another number of replicas may give other numbers. Write a "
            "`keras.Loss` or a function and give it to `compile(loss=...)`: it gets the rows of all replicas "
            "where they meet.",
            type(model).__name__,
        )  # fmt: skip


def _warn(model: Any) -> None:
    layers = [layer.name for layer in all_layers(model) if adds_losses(layer) and layer is not model]
    _LOG.warning(
        "A loss that is added by %s counts as the mean of its values on the replicas: it could not be shown "
        "to be a mean or a sum over rows, so another number of replicas may give other numbers.",
        " or ".join(sorted(layers)[:3]) or model.name,
    )
