"""Metrics of the best k classes of a ranking, where an example has one label or several.

Tests: tests/unit/estimator/test_metrics.py.
"""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp
import keras

from unisono._errors import InvalidArgumentError
from unisono._types import ArrayLike
from unisono.estimator.losses._weighted import check_weights
from unisono.estimator.metrics._sums import (
    TEXTS,
    MetricPair,
    Naming,
    Sums,
    floats,
    pair_of_sums,
    quotient,
)

_TEXTS = TEXTS.with_texts(
    labels="array of whole numbers of shape `(..., labels)` or `(...)`; classes, counted from 0.",
    predictions="float array of shape `(..., classes)`; the scores of classes.",
    predictions_idx="array of whole numbers of shape `(..., k)`; the predicted classes, counted from 0.",
    k="whole number; how many classes with the highest scores are predicted.",
    class_id="whole number; a class that alone counts. None for all classes.",
    weights="number, or float array of shape `(...)`; the weight of each example. None for 1.",
    raises={"InvalidArgumentError": "the weights do not fit, or `k` is not from 1 to the number of classes."},
)

#: Where predictions are the numbers of classes.
_TOP_TEXTS = _TEXTS.with_texts(
    k="whole number in the automatic name; it has no other effect. None for none.",
    raises={"InvalidArgumentError": "the weights do not fit."},
)


@_TEXTS
def precision_at_k(
    labels: ArrayLike,
    predictions: ArrayLike,
    k: int,
    class_id: int | None = None,
    weights: ArrayLike = None,
    **options: Unpack[Naming],
) -> MetricPair:
    """Return how many of the best k classes are labels.

    >>> float(precision_at_k([[1], [2]], [[0.1, 0.9, 0.0], [0.9, 0.1, 0.0]], k=1)[1])
    0.5
    """
    return precision_at_top_k(labels, _best(predictions, k), k, class_id, weights, **options)


@_TOP_TEXTS
def precision_at_top_k(
    labels: ArrayLike,
    predictions_idx: ArrayLike,
    k: int | None = None,
    class_id: int | None = None,
    weights: ArrayLike = None,
    **options: Unpack[Naming],
) -> MetricPair:
    """Return how many of the predicted classes are labels.

    >>> float(precision_at_top_k([[1], [2]], [[1, 0], [2, 0]])[1])
    0.5
    """
    right, wrong, _ = _matches(labels, predictions_idx, class_id)
    parts = {"true_positives": _sum(right, weights), "false_positives": _sum(wrong, weights)}
    return pair_of_sums(_name("precision", k, class_id), parts, _share, **options)


@_TEXTS
def recall_at_k(
    labels: ArrayLike,
    predictions: ArrayLike,
    k: int,
    class_id: int | None = None,
    weights: ArrayLike = None,
    **options: Unpack[Naming],
) -> MetricPair:
    """Return how many of the labels are among the best k classes.

    >>> float(recall_at_k([[1, 2]], [[0.1, 0.9, 0.0]], k=1)[1])
    0.5
    """
    return recall_at_top_k(labels, _best(predictions, k), k, class_id, weights, **options)


@_TOP_TEXTS
def recall_at_top_k(
    labels: ArrayLike,
    predictions_idx: ArrayLike,
    k: int | None = None,
    class_id: int | None = None,
    weights: ArrayLike = None,
    **options: Unpack[Naming],
) -> MetricPair:
    """Return how many of the labels are among the predicted classes.

    >>> float(recall_at_top_k([[1, 3]], [[1, 0]])[1])
    0.5
    """
    right, _, missed = _matches(labels, predictions_idx, class_id)
    parts = {"true_positives": _sum(right, weights), "false_negatives": _sum(missed, weights)}
    return pair_of_sums(_name("recall", k, class_id), parts, _share, **options)


@_TEXTS
def average_precision_at_k(
    labels: ArrayLike, predictions: ArrayLike, k: int, weights: ArrayLike = None, **options: Unpack[Naming]
) -> MetricPair:
    """Return the mean of the precisions at 1 to k, each where that class is a label.

    >>> float(average_precision_at_k([[1]], [[0.5, 0.4, 0.1]], k=2)[1])
    0.5
    """
    best = _best(predictions, k)
    wanted = _wanted(labels, best)
    hits = jnp.any(best[..., :, None] == wanted[..., None, :], axis=-1).astype(jnp.float32)
    precisions = jnp.cumsum(hits, axis=-1) / jnp.arange(1, k + 1)
    number = jnp.minimum(jnp.sum(wanted >= 0, axis=-1), k)
    averages = jnp.sum(precisions * hits, axis=-1) / number
    parts = {"total": _sum(averages, weights), "max": _sum(jnp.ones_like(averages), weights)}
    return pair_of_sums(
        f"average_precision_at_{k}", parts, lambda s: quotient(s["total"], s["max"]), **options
    )


def _share(sums: Sums) -> jax.Array:
    """Return the share of the first of two sums."""
    right, others = sums.values()
    return right / (right + others)


def _name(what: str, k: int | None, class_id: int | None) -> str:
    rank = "top_k" if k is None else str(k)
    return f"{what}_at_{rank}" if class_id is None else f"{what}_at_{rank}_class{class_id}"


def _best(predictions: ArrayLike, k: int) -> jax.Array:
    scores = keras.ops.convert_to_tensor(predictions)
    if not 1 <= k <= scores.shape[-1]:
        raise InvalidArgumentError(
            f"`k` must be from 1 to the number of classes, {scores.shape[-1]}. Received: k={k!r}."
        )
    best: jax.Array = jax.lax.top_k(scores, k)[1]
    return best


def _wanted(labels: ArrayLike, best: jax.Array) -> jax.Array:
    wanted: jax.Array = keras.ops.convert_to_tensor(labels).astype(jnp.int32)
    return wanted[..., None] if wanted.ndim == best.ndim - 1 else wanted


def _matches(
    labels: ArrayLike, predicted: ArrayLike, class_id: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the numbers of right and wrong predictions and of missed labels of each example, as of sets."""
    best = keras.ops.convert_to_tensor(predicted).astype(jnp.int32)
    wanted = _wanted(labels, best)
    of_labels, of_best = _first(wanted, class_id), _first(best, class_id)
    same = wanted[..., :, None] == best[..., None, :]
    is_found, is_right = jnp.any(same, axis=-1), jnp.any(same, axis=-2)

    def number(chosen: jax.Array) -> jax.Array:
        return jnp.sum(chosen, axis=-1).astype(jnp.float32)

    return number(of_labels & is_found), number(of_best & ~is_right), number(of_labels & ~is_found)


def _first(ids: jax.Array, class_id: int | None) -> jax.Array:
    """Return which elements are the first of their kind in an example, and of a class if one is chosen."""
    same = ids[..., :, None] == ids[..., None, :]
    is_repeated = jnp.any(same & jnp.tril(jnp.ones(same.shape[-2:], bool), -1), axis=-1)
    return ~is_repeated if class_id is None else ~is_repeated & (ids == class_id)


def _sum(values: jax.Array, weights: ArrayLike) -> jax.Array:
    if weights is None:
        return jnp.sum(values)
    shares = floats(weights)
    check_weights(shares, values)
    return jnp.sum(values * shares)
