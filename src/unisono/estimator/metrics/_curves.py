"""Metrics of the curves that many thresholds give.

Tests: tests/unit/estimator/test_metrics.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

import jax
import jax.numpy as jnp

from unisono._errors import InvalidArgumentError
from unisono._types import ArrayLike
from unisono.estimator.metrics._answers import PROBABILITIES, chosen, counts_at
from unisono.estimator.metrics._sums import MetricPair, Naming, Sums, pair_of_sums, quotient

_TEXTS = PROBABILITIES.with_texts(
    specificity="number from 0 to 1; the share of negative labels that are predicted.",
    sensitivity="number from 0 to 1; the share of positive labels that are predicted.",
    num_thresholds="whole number above 1; how many thresholds are tried, at equal distances.",
    curve='`"ROC"` or `"PR"`.',
    summation_method='`"trapezoidal"`, `"careful_interpolation"`, `"minoring"` or `"majoring"`.',
    thresholds="sequence of numbers from 0 to 1, in place of `num_thresholds`; None for none.",
    raises={"InvalidArgumentError": "the shapes do not fit, or a prediction or share is not from 0 to 1."},
)

#: Added to the ends of the thresholds, so that 0 and 1 lie between them, and to divisors.
_EDGE = 1e-7

#: Added to dividends and divisors of points of a curve.
_EPSILON = 1e-6


def _evenly(number: int, edge: float = _EDGE) -> list[float]:
    """Return thresholds at equal distances, the first below 0 and the last above 1."""
    inner = [(i + 1) / (number - 1) for i in range(number - 2)]
    return [-_EDGE, *inner, 1 + edge]


@_TEXTS
def sensitivity_at_specificity(
    labels: ArrayLike,
    predictions: ArrayLike,
    specificity: float,
    weights: ArrayLike = None,
    num_thresholds: int = 200,
    **options: Unpack[Naming],
) -> MetricPair:
    """Return the sensitivity at the threshold whose specificity is nearest to a given one.

    >>> round(float(sensitivity_at_specificity([1, 0], [0.8, 0.4], 1.0)[1]), 4)
    1.0
    """
    _check_share("specificity", specificity)

    def compute(s: Sums) -> jax.Array:
        found = s["true_negatives"] / (s["true_negatives"] + s["false_positives"] + _EDGE)
        at = jnp.argmin(jnp.abs(found - specificity))
        right = s["true_positives"][at]
        return right / (right + s["false_negatives"][at] + _EDGE)

    found = counts_at(labels, predictions, _evenly(num_thresholds), weights)
    return pair_of_sums("sensitivity_at_specificity", chosen(found, "tp fp tn fn"), compute, **options)


@_TEXTS
def specificity_at_sensitivity(
    labels: ArrayLike,
    predictions: ArrayLike,
    sensitivity: float,
    weights: ArrayLike = None,
    num_thresholds: int = 200,
    **options: Unpack[Naming],
) -> MetricPair:
    """Return the specificity at the highest threshold whose sensitivity is nearest to a given one.

    >>> round(float(specificity_at_sensitivity([1, 0], [0.8, 0.4], 1.0)[1]), 4)
    1.0
    """
    _check_share("sensitivity", sensitivity)

    def compute(s: Sums) -> jax.Array:
        found = s["true_positives"] / (s["true_positives"] + s["false_negatives"] + _EDGE)
        distance = jnp.abs(found - sensitivity)
        at = distance.size - 1 - jnp.argmin(distance[::-1])
        right = s["true_negatives"][at]
        return right / (right + s["false_positives"][at] + _EDGE)

    # TensorFlow's last threshold is below 1 here, and above it in the other functions.
    found = counts_at(labels, predictions, _evenly(num_thresholds, -_EDGE), weights)
    return pair_of_sums("specificity_at_sensitivity", chosen(found, "tp fp tn fn"), compute, **options)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise InvalidArgumentError(f"`{name}` must be from 0 to 1. Received: {value!r}.")


@_TEXTS.with_texts(
    num_thresholds="whole number above 1; how many thresholds there are, at equal distances.",
    raises={
        "InvalidArgumentError": "`curve` or `summation_method` is not one of those above, the shapes do not "
        "fit each other, or a prediction is not from 0 to 1."
    },
)
def auc(
    labels: ArrayLike,
    predictions: ArrayLike,
    weights: ArrayLike = None,
    num_thresholds: int = 200,
    metrics_collections: object = None,
    updates_collections: object = None,
    curve: str = "ROC",
    name: str | None = None,
    summation_method: str = "trapezoidal",
    thresholds: Sequence[float] | None = None,
) -> MetricPair:
    """Return the area under the ROC or the precision-recall curve, from counts at thresholds.

    >>> round(float(auc([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8])[1]), 3)
    0.75
    """
    if curve not in ("ROC", "PR"):
        raise InvalidArgumentError(f'`curve` must be "ROC" or "PR". Received: {curve!r}.')
    if summation_method not in _HEIGHTS:
        raise InvalidArgumentError(
            f"`summation_method` must be one of {sorted(_HEIGHTS)}. Received: {summation_method!r}."
        )
    points = _evenly(num_thresholds) if thresholds is None else [-_EDGE, *sorted(thresholds), 1 + _EDGE]

    def compute(s: Sums) -> jax.Array:
        tp, fp = s["true_positives"], s["false_positives"]
        fn, tn = s["false_negatives"], s["true_negatives"]
        if curve == "PR" and summation_method == "careful_interpolation":
            return _interpolated(tp, fp, fn)
        found = (tp + _EPSILON) / (tp + fn + _EPSILON)
        if curve == "ROC":
            return _area(fp / (fp + tn + _EPSILON), found, summation_method)
        return _area(found, (tp + _EPSILON) / (tp + fp + _EPSILON), summation_method)

    found = counts_at(labels, predictions, points, weights)
    return pair_of_sums("auc", chosen(found, "tp fp tn fn"), compute, name=name)


#: The height of the curve between two points.
_HEIGHTS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "trapezoidal": lambda a, b: (a + b) / 2,
    "careful_interpolation": lambda a, b: (a + b) / 2,
    "minoring": jnp.minimum,
    "majoring": jnp.maximum,
}


def _area(x: jax.Array, y: jax.Array, method: str) -> jax.Array:
    return jnp.sum((x[:-1] - x[1:]) * _HEIGHTS[method](y[:-1], y[1:]))


def _interpolated(tp: jax.Array, fp: jax.Array, fn: jax.Array) -> jax.Array:
    """Return the area under precision and recall, where counts are linear between thresholds.

    Source: Davis and Goadrich 2006, https://www.biostat.wisc.edu/~page/rocpr.pdf
    """
    positive = tp + fp
    more = tp[:-1] - tp[1:]
    slope = quotient(more, positive[:-1] - positive[1:])
    intercept = tp[1:] - slope * positive[1:]
    has_both = (positive[:-1] > 0) & (positive[1:] > 0)
    ratio = jnp.where(has_both, quotient(positive[:-1], positive[1:]), 1)
    return jnp.sum(quotient(slope * (more + intercept * jnp.log(ratio)), tp[1:] + fn[1:]))
