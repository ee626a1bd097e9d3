"""Metrics in `fit` that do not add up over the replicas: computed from all replicas' rows.

Tests: tests/virtual/models/test_losses_and_metrics.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import keras

from unisono._context import Context, OneReplica, ReplicaContext, entered
from unisono._types import PyTree
from unisono._values import ReduceOp
from unisono.step.variables._merge_rules import Merge, kind_of, merge_rule
from unisono.training.replica._rows import DiscardingScope, common_rows, gather_rows
from unisono.training.rows._row_analysis import RowUse, row_uses

_m = keras.metrics

#: Updates metrics from `(y, y_pred, sample_weight)`.
Update = Callable[..., PyTree]

#: Keras' own metrics whose variables are sums over rows, whatever their arguments; a test compares each with
#: one device. Those with an axis may relate rows: they are read, as users' metrics are.
_ADD_UP = frozenset(
    {
        *(_m.Accuracy, _m.BinaryAccuracy, _m.CategoricalAccuracy, _m.SparseCategoricalAccuracy),
        *(_m.TopKCategoricalAccuracy, _m.SparseTopKCategoricalAccuracy, _m.BinaryCrossentropy),
        *(_m.KLDivergence, _m.Poisson),
        *(_m.MeanSquaredError, _m.MeanAbsoluteError, _m.MeanAbsolutePercentageError),
        *(_m.MeanSquaredLogarithmicError, _m.RootMeanSquaredError, _m.LogCoshError, _m.R2Score),
        *(_m.AUC, _m.Precision, _m.Recall, _m.TruePositives, _m.TrueNegatives, _m.FalsePositives),
        *(_m.FalseNegatives, _m.F1Score, _m.FBetaScore, _m.PrecisionAtRecall, _m.RecallAtPrecision),
        *(_m.SensitivityAtSpecificity, _m.SpecificityAtSensitivity, _m.IoU, _m.BinaryIoU, _m.MeanIoU),
        *(_m.OneHotIoU, _m.OneHotMeanIoU, _m.CategoricalHinge),
    }
)


def metrics_add_up(update: Update, metrics: Sequence[keras.Metric], given: PyTree, context: Context) -> bool:
    """Return whether the metrics' variables, added up over the replicas, are those of one device.

    Args:
        update: from `(y, y_pred, sample_weight)`; updates the metrics.
        given: the arguments of `update`, with this replica's rows.
    """
    others = [m for m in metrics if type(m) not in _ADD_UP]
    rows, replica = common_rows(given), context.replica
    if not others or not rows or replica is None:
        return True
    variables = [v for m in metrics for v in m.variables]
    if any(merge_rule(kind_of(v)) is not Merge.SUM for v in variables):
        return False
    total = replica._engine.total(rows)
    shapes = [jax.ShapeDtypeStruct((rows, *v.shape), v.dtype) for v in variables]

    def after(given: PyTree, before: list[jax.Array]) -> list[jax.Array]:
        # A replica's part of a sum is itself a sum over its rows: so the analysis sees the old value as one.
        start = list(zip(variables, [jnp.sum(b, axis=0, dtype=b.dtype) for b in before], strict=True))
        traced = common_rows(given) or rows
        part = ReplicaContext(replica.strategy, _PartEngine(total / traced))
        with entered(Context(context.strategy, part, means=True)), DiscardingScope(start) as scope:
            update(*given)
        return [scope.get_current_value(v) for v in variables]

    try:
        uses = row_uses(after, (jax.tree.map(jnp.asarray, given), shapes), rows, total)
    except Exception:
        # What cannot be traced for all rows holds arrays of this replica's rows.
        from unisono.training.rows._other_sizes import runs_with

        return not runs_with(total, after, (jax.tree.map(jnp.asarray, given), shapes))
    return all(use is RowUse.SUM for use in uses)


class _PartEngine(OneReplica):
    """An engine for tracing, which computes nothing: the traced rows are 1 / `num_replicas` of all."""

    def __init__(self, num_replicas: float) -> None:
        # A protocol's int; a ratio need not be one where replicas have unequal rows.
        self.num_replicas = num_replicas  # type: ignore[assignment]

    def total(self, size: int) -> int:
        """Return the size in all replicas."""
        return round(size * self.num_replicas)


def update_with_all_rows(
    update: Update, metrics: Sequence[keras.Metric], given: PyTree, replica: ReplicaContext
) -> PyTree:
    """Update metrics with the rows of all replicas, and leave in each replica its part of a sum."""
    variables = [v for m in metrics for v in m.variables]
    summed = [v for v in variables if merge_rule(kind_of(v)) is Merge.SUM]
    engine = replica._engine
    gathered = gather_rows(jax.tree.map(jnp.asarray, given), engine)
    sums = engine.all_reduce(ReduceOp.SUM, [jnp.asarray(v.value) for v in summed])
    for variable, value in zip(summed, sums, strict=True):
        variable.assign(value)
    with entered(None):
        results = update(*gathered)
    # Every replica has the sum now; at the step's end the copies are added up.
    is_first = jnp.equal(engine.replica_id, 0)
    for variable in summed:
        value = jnp.asarray(variable.value)
        variable.assign(jnp.where(is_first, value, jnp.zeros_like(value)))
    return results
