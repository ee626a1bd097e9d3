"""Gradients of one replica, made those of all before an optimizer applies them.

Tests: tests/virtual/models/test_zoo.py, tests/virtual/models/test_losses_and_metrics.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import keras

from unisono._context import Context, ReplicaContext
from unisono._values import ReduceOp
from unisono.step._layout import GradientReducer

#: What an optimizer gets for a variable.
Gradient = jax.Array | None


def aggregate_gradients(
    grads: list[Gradient],
    variables: Sequence[keras.Variable],
    context: Context,
    reduce: GradientReducer | None = None,
) -> list[Gradient]:
    """Return the gradients that an optimizer must apply, equal on all replicas.

    Args:
        grads: this replica's; None for a variable without one.
        variables: one for each gradient. Where `overwrite_with_gradient` is set, the gradient is the
            variable's next value: float8's history of largest values.
        reduce: what is called instead of an all-reduce; it may leave each replica its part.
    """
    replica = context.replica
    if replica is None or replica.num_replicas_in_sync == 1:
        return grads
    if replica.engine.is_empty:
        # A mean over no rows is NaN.
        grads = [None if g is None else jnp.zeros_like(g) for g in grads]
    next_values = {i for i, v in enumerate(variables) if getattr(v, "overwrite_with_gradient", False)}
    reduced = {i: g for i, g in enumerate(grads) if g is not None and i not in next_values}
    largest = {i: g for i, g in enumerate(grads) if g is not None and i in next_values}
    op, given = ReduceOp.MEAN if context.means else ReduceOp.SUM, list(reduced.values())
    sums = (
        replica.all_reduce(op, given)
        if reduce is None
        else reduce(op, given, [variables[i] for i in reduced])
    )
    found: dict[int, Gradient] = dict(zip(reduced, sums, strict=True))
    if largest:
        found |= dict(zip(largest, _largest(list(largest.values()), replica), strict=True))
    return [found.get(i) for i in range(len(grads))]


def _largest(values: list[jax.Array], replica: ReplicaContext) -> list[jax.Array]:
    """Return the largest of all replicas' values, place by place, in one message."""
    # An engine adds, and gathers: the histories are a few hundred numbers, so gathering costs nothing.
    flat = jnp.concatenate([v.astype(jnp.float32).reshape(-1) for v in values])
    ends = list(itertools.accumulate(v.size for v in values))[:-1]
    best = jnp.split(jnp.max(replica.engine.all_gather(flat[None], 0), axis=0), ends)
    return [x.reshape(v.shape).astype(v.dtype) for x, v in zip(best, values, strict=True)]
