"""Precision and recall, at one threshold or at many.

Tests: tests/unit/estimator/test_metrics.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono._types import ArrayLike
from unisono.estimator.metrics._answers import ANSWERS, AT_THRESHOLDS, chosen, counts, counts_at
from unisono.estimator.metrics._sums import MetricPair, pair_of_sums, quotient

#: Added to divisors.
_EDGE = 1e-7


@ANSWERS
def precision(
    labels: ArrayLike,
    predictions: ArrayLike,
    weights: ArrayLike = None,
    metrics_collections: object = None,
    updates_collections: object = None,
    name: str | None = None,
) -> MetricPair:
    """Return how many of the positive predictions are right; 0 where there is none.

    >>> float(precision([1, 1, 0, 0], [1, 0, 1, 0])[1])
    0.5
    """
    parts = chosen(counts(labels, predictions, weights), "tp fp")
    return pair_of_sums(
        name or "precision",
        parts,
        lambda s: quotient(s["true_positives"], s["true_positives"] + s["false_positives"]),
    )


@ANSWERS
def recall(
    labels: ArrayLike,
    predictions: ArrayLike,
    weights: ArrayLike = None,
    metrics_collections: object = None,
    updates_collections: object = None,
    name: str | None = None,
) -> MetricPair:
    """Return how many of the positive labels are predicted; 0 where there is none.

    >>> float(recall([1, 1, 1, 0], [1, 1, 0, 0])[1] * 3)
    2.0
    """
    parts = chosen(counts(labels, predictions, weights), "tp fn")
    return pair_of_sums(
        name or "recall",
        parts,
        lambda s: quotient(s["true_positives"], s["true_positives"] + s["false_negatives"]),
    )


@AT_THRESHOLDS
def precision_at_thresholds(
    labels: ArrayLike,
    predictions: ArrayLike,
    thresholds: Sequence[float],
    weights: ArrayLike = None,
    metrics_collections: object = None,
    updates_collections: object = None,
    name: str | None = None,
) -> MetricPair:
    """Return the precision where probabilities above each threshold are positive.

    >>> precision_at_thresholds([1, 0], [0.8, 0.4], [0.2, 0.6])[1].round(3).tolist()
    [0.5, 1.0]
    """
    parts = chosen(counts_at(labels, predictions, thresholds, weights), "tp fp")
    return pair_of_sums(
        name or "precision_at_thresholds",
        parts,
        lambda s: s["true_positives"] / (_EDGE + s["true_positives"] + s["false_positives"]),
    )


@AT_THRESHOLDS
def recall_at_thresholds(
    labels: ArrayLike,
    predictions: ArrayLike,
    thresholds: Sequence[float],
    weights: ArrayLike = None,
    metrics_collections: object = None,
    updates_collections: object = None,
    name: str | None = None,
) -> MetricPair:
    """Return the recall where probabilities above each threshold are positive.

    >>> recall_at_thresholds([1, 1], [0.8, 0.4], [0.2, 0.6])[1].round(3).tolist()
    [1.0, 0.5]
    """
    parts = chosen(counts_at(labels, predictions, thresholds, weights), "tp fn")
    return pair_of_sums(
        name or "recall_at_thresholds",
        parts,
        lambda s: s["true_positives"] / (_EDGE + s["true_positives"] + s["false_negatives"]),
    )
