"""Metrics that are means: of values, of errors, of classes.

Tests: tests/unit/estimator/test_metrics.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import jax
import jax.numpy as jnp
import keras

from unisono._types import ArrayLike
from unisono.estimator.metrics._sums import (
    TEXTS,
    MetricPair,
    Naming,
    Sums,
    aligned,
    broadcast_weights,
    floats,
    pair_of,
    pair_of_sums,
    quotient,
)

_TEXTS = TEXTS.with_texts(
    threshold="number; values below it are counted.", dim="whole number; the axis of vectors."
)

_CLASSES = TEXTS.with_texts(
    labels="array of any shape; the numbers of classes, counted from 0.",
    predictions="array of as many elements as `labels`; the predicted classes.",
    num_classes="whole number; how many classes there are.",
    weights="number, or float array of as many elements as `labels`. None for 1.",
)


def _mean(
    name: str,
    values: jax.Array,
    weights: jax.Array,
    options: Naming,
    after: Callable[[jax.Array], jax.Array] = lambda mean: mean,
) -> MetricPair:
    parts = {"total": jnp.sum(floats(values) * weights), "count": jnp.sum(weights)}
    return pair_of_sums(name, parts, lambda sums: after(quotient(sums["total"], sums["count"])), **options)


@_TEXTS
def mean(values: ArrayLike, weights: ArrayLike = None, **options: Unpack[Naming]) -> MetricPair:
    """Return the mean of values.

    >>> value, updated = mean([1.0, 2.0, 6.0])
    >>> float(updated)
    3.0
    """
    numbers = floats(values)
    return _mean("mean", numbers, broadcast_weights(weights, numbers), options)


@_TEXTS
def accuracy(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike = None, **options: Unpack[Naming]
) -> MetricPair:
    """Return how many predictions equal the labels, by how many there are.

    >>> float(accuracy(labels=[1, 2, 3, 4], predictions=[1, 2, 3, 5])[1])
    0.75
    """
    outputs, targets, shares = aligned(predictions, labels, weights)
    return _mean("accuracy", outputs.astype(targets.dtype) == targets, shares, options)


@_TEXTS
def mean_absolute_error(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike = None, **options: Unpack[Naming]
) -> MetricPair:
    """Return the mean absolute difference.

    >>> float(mean_absolute_error([1.0, 2.0], [2.0, 4.0])[1])
    1.5
    """
    outputs, targets, shares = aligned(predictions, labels, weights)
    return _mean("mean_absolute_error", jnp.abs(outputs - targets), shares, options)


@_TEXTS
def mean_squared_error(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike = None, **options: Unpack[Naming]
) -> MetricPair:
    """Return the mean squared difference.

    >>> float(mean_squared_error([1.0, 2.0], [2.0, 4.0])[1])
    2.5
    """
    outputs, targets, shares = aligned(predictions, labels, weights)
    return _mean("mean_squared_error", jnp.square(outputs - targets), shares, options)


@_TEXTS
def root_mean_squared_error(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike = None, **options: Unpack[Naming]
) -> MetricPair:
    """Return the root of the mean squared difference.

    >>> float(root_mean_squared_error([1.0, 2.0], [3.0, 4.0])[1])
    2.0
    """
    outputs, targets, shares = aligned(predictions, labels, weights)
    return _mean("root_mean_squared_error", jnp.square(outputs - targets), shares, options, jnp.sqrt)


@_TEXTS.with_texts(normalizer="float array of the shape of `labels`; where it is 0, the error counts as 0.")
def mean_relative_error(
    labels: ArrayLike,
    predictions: ArrayLike,
    normalizer: ArrayLike,
    weights: ArrayLike = None,
    **options: Unpack[Naming],
) -> MetricPair:
    """Return the mean of absolute differences by a normalizer.

    >>> float(mean_relative_error([1.0, 2.0], [2.0, 4.0], [1.0, 4.0])[1])
    0.75
    """
    outputs, targets, shares = aligned(predictions, labels, weights)
    outputs, norms, _ = aligned(outputs, normalizer, None)
    errors = jnp.where(norms == 0, 0, jnp.abs(targets - outputs) / jnp.where(norms == 0, 1, norms))
    return _mean("mean_relative_error", errors, shares, options)


@_TEXTS.with_texts(
    labels="float array of any shape; vectors of length 1.",
    predictions="float array of the shape of `labels`; vectors of length 1.",
    weights="number, or float array of the shape of `labels`, but of size 1 in the axis `dim`; None for 1.",
)
def mean_cosine_distance(
    labels: ArrayLike, predictions: ArrayLike, dim: int, weights: ArrayLike = None, **options: Unpack[Naming]
) -> MetricPair:
    """Return the mean of one minus the product of vectors of length 1.

    >>> float(mean_cosine_distance([[1.0, 0.0]], [[0.0, 1.0]], dim=1)[1])
    1.0
    """
    outputs, targets, _ = aligned(predictions, labels, None)
    products = jnp.sum(outputs * targets, axis=dim, keepdims=True)
    shares = broadcast_weights(weights, products)
    return _mean("mean_cosine_distance", products, shares, options, lambda product: 1 - product)


@_TEXTS
def percentage_below(
    values: ArrayLike, threshold: float, weights: ArrayLike = None, **options: Unpack[Naming]
) -> MetricPair:
    """Return the share of values below a threshold.

    >>> float(percentage_below([1.0, 2.0, 3.0, 4.0], 2.5)[1])
    0.5
    """
    numbers = keras.ops.convert_to_tensor(values)
    shares = broadcast_weights(weights, numbers)
    return _mean("percentage_below_threshold", numbers < threshold, shares, options)


@_TEXTS.with_texts(
    values="float array of any shape, which is the same in each batch.",
    returns=pair_of("the shape of `values`"),
)
def mean_tensor(values: ArrayLike, weights: ArrayLike = None, **options: Unpack[Naming]) -> MetricPair:
    """Return the mean of arrays, element by element.

    >>> mean_tensor([1.0, 2.0])[1].tolist()
    [1.0, 2.0]
    """
    numbers = floats(values)
    shares = broadcast_weights(weights, numbers)
    parts = {"total_tensor": numbers * shares, "count_tensor": shares}
    return pair_of_sums("mean_tensor", parts, lambda sums: quotient(*sums.values()), **options)


@_CLASSES
def mean_per_class_accuracy(
    labels: ArrayLike,
    predictions: ArrayLike,
    num_classes: int,
    weights: ArrayLike = None,
    **options: Unpack[Naming],
) -> MetricPair:
    """Return the mean over classes of the accuracy of the examples of each; 0 for a class without any.

    >>> float(mean_per_class_accuracy([0, 0, 1], [0, 1, 1], 2)[1])
    0.75
    """
    outputs, targets, shares = _flat(labels, predictions, weights)
    is_right = (outputs.astype(targets.dtype) == targets) * shares
    chosen = jax.nn.one_hot(targets, num_classes, dtype=shares.dtype)
    parts = {"total": shares @ chosen, "count": is_right @ chosen}
    return pair_of_sums(
        "mean_accuracy", parts, lambda sums: jnp.mean(quotient(sums["count"], sums["total"])), **options
    )


@_CLASSES.with_texts(
    num_classes="whole number; how many classes there are, of which those without elements do not count."
)
def mean_iou(
    labels: ArrayLike,
    predictions: ArrayLike,
    num_classes: int,
    weights: ArrayLike = None,
    **options: Unpack[Naming],
) -> MetricPair:
    """Return the mean over classes of intersection by union of labels and predictions.

    >>> round(float(mean_iou([0, 0, 1], [0, 1, 1], 2)[1]), 4)
    0.5
    """
    outputs, targets, shares = _flat(labels, predictions, weights)
    rows = jax.nn.one_hot(targets, num_classes, dtype=shares.dtype) * shares[:, None]
    columns = jax.nn.one_hot(outputs.astype(targets.dtype), num_classes, dtype=shares.dtype)

    def compute(sums: Sums) -> jax.Array:
        matrix = sums["total_confusion_matrix"]
        both = jnp.diagonal(matrix)
        either = jnp.sum(matrix, 0) + jnp.sum(matrix, 1) - both
        shared = jnp.sum(both / jnp.where(either > 0, either, 1))
        return quotient(shared, jnp.sum(either != 0).astype(shared.dtype))

    return pair_of_sums("mean_iou", {"total_confusion_matrix": rows.T @ columns}, compute, **options)


def _flat(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return predictions, whole-numbered labels and weights as vectors."""
    targets = keras.ops.convert_to_tensor(labels).astype(jnp.int32).reshape(-1)
    outputs = keras.ops.convert_to_tensor(predictions).reshape(-1)
    shares = None if weights is None else floats(weights)
    return aligned(outputs, targets, shares if shares is None or not shares.ndim else shares.reshape(-1))
