"""Right and wrong answers about two classes, counted at one threshold or at many, and metrics of these.

Tests: tests/unit/estimator/test_metrics.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Unpack

import jax
import jax.numpy as jnp

from unisono._errors import InvalidArgumentError
from unisono._types import ArrayLike
from unisono.estimator.metrics._sums import (
    TEXTS,
    MetricPair,
    Naming,
    Sums,
    aligned,
    pair_of,
    pair_of_sums,
    quotient,
)

#: The texts for arguments of metrics whose predictions are truth values.
ANSWERS = TEXTS.with_texts(
    labels="array of any shape; truth values, or numbers, of which 0 stands for false.",
    predictions="array of the shape of `labels`; truth values, or numbers, of which 0 stands for false.",
)

#: Those of metrics whose predictions are probabilities.
PROBABILITIES = TEXTS.with_texts(
    labels="array of any shape; truth values, or numbers, of which 0 stands for false.",
    predictions="float array of the shape of `labels`; probabilities from 0 to 1.",
    raises={"InvalidArgumentError": "the shapes do not fit each other, or a prediction is not from 0 to 1."},
)

#: Those of metrics at thresholds.
AT_THRESHOLDS = PROBABILITIES.with_texts(
    thresholds="sequence of numbers from 0 to 1; predictions above a threshold are positive.",
    returns=pair_of("shape `(len(thresholds),)`"),
)


def counts(labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike) -> dict[str, jax.Array]:
    """Return the weights of right and wrong answers, where predictions are truth values."""
    outputs, targets, shares = aligned(predictions, labels, weights)
    says, holds = outputs.astype(bool), targets.astype(bool)
    answers_of = {"tp": holds & says, "fp": ~holds & says, "tn": ~holds & ~says, "fn": holds & ~says}
    return {key: jnp.sum(answers * shares) for key, answers in answers_of.items()}


def counts_at(
    labels: ArrayLike, predictions: ArrayLike, thresholds: Sequence[float], weights: ArrayLike
) -> dict[str, jax.Array]:
    """Return the weights of right and wrong answers at thresholds, where predictions are probabilities."""
    outputs, targets, shares = (x.reshape(-1) for x in aligned(predictions, labels, weights))
    if not isinstance(outputs, jax.core.Tracer) and not bool(jnp.all((outputs >= 0) & (outputs <= 1))):
        raise InvalidArgumentError(
            "`predictions` must be from 0 to 1. Received: others. Write `keras.ops.sigmoid(logits)`."
        )
    outputs = outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
    holds = targets.astype(bool)
    says = (outputs[None, :] > jnp.asarray(list(thresholds), outputs.dtype)[:, None]).astype(shares.dtype)
    both = jnp.stack([shares * holds, shares * ~holds], axis=1)
    exactly = jax.lax.Precision.HIGHEST
    positive, negative = jnp.dot(says, both, precision=exactly), jnp.dot(1 - says, both, precision=exactly)
    return {"tp": positive[:, 0], "fp": positive[:, 1], "fn": negative[:, 0], "tn": negative[:, 1]}


def chosen(counts: Mapping[str, jax.Array], keys: str) -> dict[str, jax.Array]:
    """Return some of the four counts, by their long names."""
    names = {"tp": "true_positives", "fp": "false_positives", "tn": "true_negatives", "fn": "false_negatives"}
    return {names[key]: counts[key] for key in keys.split()}


#: Added to the ends of the thresholds, so that 0 and 1 lie between them, and to divisors.
_EDGE = 1e-7


def _of_counts(
    name: str,
    keys: str,
    text: str,
    example: tuple[str, float],
    example_at: tuple[str, list[float]],
    compute: Callable[..., jax.Array] = lambda right: right,
    compute_at: Callable[..., jax.Array] = lambda right: right,
) -> tuple[Callable[..., MetricPair], Callable[..., MetricPair]]:
    """Return the metrics of some of the four counts: of truth values, and of probabilities at thresholds.

    Args:
        name: the name of the first metric.
        keys: which counts there are, with spaces between them.
        text: the docstring of the first metric, and of the second one up to a semicolon.
        example: arguments and result of the first metric in its docstring; `example_at`: of the second.
        compute: a function of the counts for the first metric; `compute_at` is that of the second.
    """
    at_thresholds = f"{name}_at_thresholds"

    def of_answers(
        labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike = None, **options: Unpack[Naming]
    ) -> MetricPair:
        found = chosen(counts(labels, predictions, weights), keys)
        return pair_of_sums(name, found, lambda sums: compute(*sums.values()), **options)

    def of_probabilities(
        labels: ArrayLike,
        predictions: ArrayLike,
        thresholds: Sequence[float],
        weights: ArrayLike = None,
        **options: Unpack[Naming],
    ) -> MetricPair:
        found = chosen(counts_at(labels, predictions, thresholds, weights), keys)
        return pair_of_sums(at_thresholds, found, lambda sums: compute_at(*sums.values()), **options)

    of_answers.__name__ = of_answers.__qualname__ = name
    of_probabilities.__name__ = of_probabilities.__qualname__ = at_thresholds
    given, result = example
    of_answers.__doc__ = f"{text}.\n\n>>> float({name}({given})[1])\n{result}\n"
    text, (given, results) = text.partition(";")[0], example_at
    of_probabilities.__doc__ = (
        f"{text}, at each threshold.\n\n>>> {at_thresholds}({given})[1].round(3).tolist()\n{results}\n"
    )
    return ANSWERS(of_answers), AT_THRESHOLDS(of_probabilities)


# fmt: off
_ANSWERS, _PROBABILITIES = "[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]", "[1, 0, 0], [0.8, 0.4, 0.1], [0.2, 0.9]"
true_positives, true_positives_at_thresholds = _of_counts(
    "true_positives", "tp", "Return the weight of positive predictions that are right",
    (_ANSWERS, 2.0), (_PROBABILITIES, [1.0, 0.0]),
)
false_positives, false_positives_at_thresholds = _of_counts(
    "false_positives", "fp", "Return the weight of positive predictions that are wrong",
    (_ANSWERS, 1.0), (_PROBABILITIES, [1.0, 0.0]),
)
true_negatives, true_negatives_at_thresholds = _of_counts(
    "true_negatives", "tn", "Return the weight of negative predictions that are right",
    (_ANSWERS, 3.0), (_PROBABILITIES, [1.0, 2.0]),
)
false_negatives, false_negatives_at_thresholds = _of_counts(
    "false_negatives", "fn", "Return the weight of negative predictions that are wrong",
    (_ANSWERS, 0.0), (_PROBABILITIES, [0.0, 1.0]),
)
precision, precision_at_thresholds = _of_counts(
    "precision", "tp fp", "Return how many of the positive predictions are right; 0 where there is none",
    ("[1, 1, 0, 0], [1, 0, 1, 0]", 0.5), ("[1, 0], [0.8, 0.4], [0.2, 0.6]", [0.5, 1.0]),
    lambda right, wrong: quotient(right, right + wrong),
    lambda right, wrong: right / (_EDGE + right + wrong),
)
recall, recall_at_thresholds = _of_counts(
    "recall", "tp fn", "Return how many of the positive labels are predicted; 0 where there is none",
    ("[1, 1, 0], [1, 0, 0]", 0.5), ("[1, 1], [0.8, 0.4], [0.2, 0.6]", [1.0, 0.5]),
    lambda right, missed: quotient(right, right + missed),
    lambda right, missed: right / (_EDGE + right + missed),
)
# fmt: on


# --- curves ------------------------------------------------------------------------------------------------

_CURVE_TEXTS = PROBABILITIES.with_texts(
    specificity="number from 0 to 1; the share of negative labels that are predicted.",
    sensitivity="number from 0 to 1; the share of positive labels that are predicted.",
    num_thresholds="whole number above 1; how many thresholds are tried, at equal distances.",
    curve='`"ROC"` or `"PR"`.',
    summation_method='`"trapezoidal"`, `"careful_interpolation"`, `"minoring"` or `"majoring"`.',
    thresholds="sequence of numbers from 0 to 1, in place of `num_thresholds`; None for none.",
    raises={"InvalidArgumentError": "the shapes do not fit, or a prediction or share is not from 0 to 1."},
)

#: Added to dividends and divisors of points of a curve.
_EPSILON = 1e-6


def _evenly(number: int, edge: float = _EDGE) -> list[float]:
    """Return thresholds at equal distances, the first below 0 and the last above 1."""
    inner = [(i + 1) / (number - 1) for i in range(number - 2)]
    return [-_EDGE, *inner, 1 + edge]


@_CURVE_TEXTS
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
        specificities = s["true_negatives"] / (s["true_negatives"] + s["false_positives"] + _EDGE)
        at = jnp.argmin(jnp.abs(specificities - specificity))
        right = s["true_positives"][at]
        return right / (right + s["false_negatives"][at] + _EDGE)

    counts = counts_at(labels, predictions, _evenly(num_thresholds), weights)
    return pair_of_sums("sensitivity_at_specificity", chosen(counts, "tp fp tn fn"), compute, **options)


@_CURVE_TEXTS
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
        sensitivities = s["true_positives"] / (s["true_positives"] + s["false_negatives"] + _EDGE)
        distance = jnp.abs(sensitivities - sensitivity)
        at = distance.size - 1 - jnp.argmin(distance[::-1])
        right = s["true_negatives"][at]
        return right / (right + s["false_positives"][at] + _EDGE)

    # TensorFlow's last threshold is below 1 here, and above it in the other functions.
    counts = counts_at(labels, predictions, _evenly(num_thresholds, -_EDGE), weights)
    return pair_of_sums("specificity_at_sensitivity", chosen(counts, "tp fp tn fn"), compute, **options)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise InvalidArgumentError(f"`{name}` must be from 0 to 1. Received: {value!r}.")


@_CURVE_TEXTS.with_texts(
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
    curve: Literal["ROC", "PR"] = "ROC",
    name: str | None = None,
    summation_method: Literal["trapezoidal", "careful_interpolation", "minoring", "majoring"] = "trapezoidal",
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
        rates = (tp + _EPSILON) / (tp + fn + _EPSILON)
        if curve == "ROC":
            return _area(fp / (fp + tn + _EPSILON), rates, summation_method)
        return _area(rates, (tp + _EPSILON) / (tp + fp + _EPSILON), summation_method)

    counts = counts_at(labels, predictions, points, weights)
    return pair_of_sums("auc", chosen(counts, "tp fp tn fn"), compute, name=name)


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
