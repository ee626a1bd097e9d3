"""Metrics in `fit` that do not add up over the replicas: computed of all replicas' rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from unisono._context import Context, ReplicaContext, entered
from unisono._values import ReduceOp
from unisono.step.variables._merge_rules import Merge, kind_of, merge_rule
from unisono.training.replica._row_analysis import RowUse, row_uses
from unisono.training.replica._rows import Aside, gather_rows, rows_of

_m = keras.metrics

#: Keras' own metrics whose variables are sums over rows; a test compares each with one device.
_ADD_UP = frozenset(
    {
        *(_m.Accuracy, _m.BinaryAccuracy, _m.CategoricalAccuracy, _m.SparseCategoricalAccuracy),
        *(_m.TopKCategoricalAccuracy, _m.SparseTopKCategoricalAccuracy, _m.BinaryCrossentropy),
        *(_m.CategoricalCrossentropy, _m.SparseCategoricalCrossentropy, _m.KLDivergence, _m.Poisson),
        *(_m.MeanSquaredError, _m.MeanAbsoluteError, _m.MeanAbsolutePercentageError, _m.CosineSimilarity),
        *(_m.MeanSquaredLogarithmicError, _m.RootMeanSquaredError, _m.LogCoshError, _m.R2Score),
        *(_m.AUC, _m.Precision, _m.Recall, _m.TruePositives, _m.TrueNegatives, _m.FalsePositives),
        *(_m.FalseNegatives, _m.F1Score, _m.FBetaScore, _m.PrecisionAtRecall, _m.RecallAtPrecision),
        *(_m.SensitivityAtSpecificity, _m.SpecificityAtSensitivity, _m.IoU, _m.BinaryIoU, _m.MeanIoU),
        *(_m.OneHotIoU, _m.OneHotMeanIoU, _m.CategoricalHinge),
    }
)


def metrics_add_up(update: Callable[..., Any], metrics: list[Any], given: Any, context: Context) -> bool:
    """Whether the metrics' variables, added up over the replicas, are those of one device.

    Args:
        update: from `(y, y_pred, sample_weight)`; updates the metrics.
        metrics: what it updates.
        given: the arguments of `update`, with this replica's rows.
        context: the replica's.
    """
    others = [m for m in metrics if type(m) not in _ADD_UP]
    rows, replica = rows_of(given), context.replica
    if not others or not rows or replica is None:
        return True
    variables = [v for m in metrics for v in m.variables]
    if any(merge_rule(kind_of(v)) is not Merge.SUM for v in variables):
        return False
    total = replica.engine.total(rows)
    shapes = [jax.ShapeDtypeStruct((rows, *v.shape), v.dtype) for v in variables]

    def after(given: Any, before: list[Any]) -> list[Any]:
        # A sum over rows stands for what a replica has of a sum.
        start = list(zip(variables, [jnp.sum(b, axis=0, dtype=b.dtype) for b in before], strict=True))
        traced = rows_of(given) or rows
        part = ReplicaContext(context.strategy, _PartEngine(total / traced))
        with entered(Context(context.strategy, part, means=True)), Aside(start) as scope:
            update(*given)
        return [scope.get_current_value(v) for v in variables]

    try:
        uses = row_uses(after, (jax.tree.map(jnp.asarray, given), shapes), rows, total)
    except Exception:
        # What cannot be traced for another number of rows holds arrays of this replica's rows.
        return True
    return all(use is RowUse.SUM for use in uses)


class _PartEngine:
    """An engine of which only the number of replicas is asked: how often the traced rows fit into all."""

    replica_id = 0
    is_empty = False

    def __init__(self, num_replicas: float) -> None:
        self.num_replicas: Any = num_replicas

    def all_reduce(self, op: ReduceOp, tree: Any) -> Any:
        """The tree: nothing is computed."""
        return tree

    def total(self, size: int) -> Any:
        """The size in all replicas."""
        return round(size * self.num_replicas)

    def all_gather(self, tree: Any, axis: int) -> Any:
        """The tree: nothing is computed."""
        return tree

    def exchange(self, tree: Any) -> Any:
        """The tree: nothing is computed."""
        return tree


def update_with_all_rows(
    update: Callable[..., Any], metrics: list[Any], given: Any, replica: ReplicaContext
) -> Any:
    """Update metrics with the rows of all replicas, and leave in each replica its part of a sum.

    Args:
        update: from `(y, y_pred, sample_weight)`; updates the metrics.
        metrics: what it updates.
        given: the arguments of `update`, with this replica's rows.
        replica: this replica.

    Returns:
        What `update` returns.
    """
    variables = [v for m in metrics for v in m.variables]
    summed = [v for v in variables if merge_rule(kind_of(v)) is Merge.SUM]
    engine = replica.engine
    gathered = gather_rows(jax.tree.map(jnp.asarray, given), engine)
    sums = engine.all_reduce(ReduceOp.SUM, [jnp.asarray(v.value) for v in summed])
    for variable, value in zip(summed, sums, strict=True):
        variable.assign(value)
    with entered(None):
        results = update(*gathered)
    is_first = jnp.equal(engine.replica_id, 0)
    for variable in summed:
        value = jnp.asarray(variable.value)
        variable.assign(jnp.where(is_first, value, jnp.zeros_like(value)))
    return results
