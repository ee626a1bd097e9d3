"""The losses of TensorFlow 1's `tf.losses`, function by function.

Tests: tests/unit/estimator/test_losses.py, tests/virtual/estimator/test_replica_losses.py.
"""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._types import ArrayLike
from unisono.estimator._collections import LOSSES
from unisono.estimator.losses._weighted import (
    ELEMENT_TEXTS,
    TEXTS,
    LossOptions,
    Reduction,
    add_loss,
    check_weights,
    compute_weighted_loss,
    divide,
    parts,
    sum_of_part,
)


@ELEMENT_TEXTS
def absolute_difference(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike = 1.0, **options: Unpack[LossOptions]
) -> jax.Array:
    """Return the mean absolute difference.

    >>> float(absolute_difference([1.0, 2.0], [2.0, 4.0]))
    1.5
    """
    targets, outputs = _pair(labels, predictions)
    return compute_weighted_loss(jnp.abs(outputs - targets), weights, **options)


@ELEMENT_TEXTS
def mean_squared_error(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike = 1.0, **options: Unpack[LossOptions]
) -> jax.Array:
    """Return the mean squared difference.

    >>> float(mean_squared_error(labels=[1.0, 2.0], predictions=[2.0, 4.0]))
    2.5
    """
    targets, outputs = _pair(labels, predictions)
    return compute_weighted_loss(jnp.square(outputs - targets), weights, **options)


@ELEMENT_TEXTS.with_texts(
    delta="number above 0; up to this difference the loss is a square, beyond it linear."
)
def huber_loss(
    labels: ArrayLike,
    predictions: ArrayLike,
    weights: ArrayLike = 1.0,
    delta: float = 1.0,
    **options: Unpack[LossOptions],
) -> jax.Array:
    """Return the mean Huber loss: half the square of a difference up to `delta`, linear beyond.

    >>> float(huber_loss([0.0, 0.0], [1.0, 3.0]))
    1.5
    """
    targets, outputs = _pair(labels, predictions)
    difference = jnp.abs(outputs - targets)
    inner = jnp.minimum(difference, delta)
    # Not `maximum(difference - delta, 0)`: at `delta` both parts would have a gradient.
    values = 0.5 * inner * inner + delta * (difference - inner)
    return compute_weighted_loss(values, weights, **options)


@ELEMENT_TEXTS.with_texts(
    labels="float array of any shape; probabilities of the class 1, or 0 and 1.",
    predictions="float array of the shape of `labels`; predicted probabilities of the class 1.",
    epsilon="number, added to probabilities before their logarithm is taken.",
)
def log_loss(
    labels: ArrayLike,
    predictions: ArrayLike,
    weights: ArrayLike = 1.0,
    epsilon: float = 1e-7,
    **options: Unpack[LossOptions],
) -> jax.Array:
    """Return the mean cross-entropy of probabilities of two classes.

    >>> round(float(log_loss([1.0], [0.5])), 4)
    0.6931
    """
    targets, outputs = _pair(labels, predictions)
    values = -targets * jnp.log(outputs + epsilon) - (1 - targets) * jnp.log(1 - outputs + epsilon)
    return compute_weighted_loss(values, weights, **options)


@ELEMENT_TEXTS.with_texts(labels="array of any shape; 0 or 1.")
def hinge_loss(
    labels: ArrayLike, logits: ArrayLike, weights: ArrayLike = 1.0, **options: Unpack[LossOptions]
) -> jax.Array:
    """Return the mean hinge loss.

    >>> float(hinge_loss([1.0, 0.0], [0.5, -3.0]))
    0.25
    """
    targets, outputs = _pair(labels, logits, "logits")
    values = jax.nn.relu(1 - (2 * targets - 1) * outputs)
    return compute_weighted_loss(values, weights, **options)


@TEXTS.with_texts(
    labels="float array of any shape; vectors of length 1.",
    predictions="float array of the shape of `labels`; vectors of length 1.",
    axis="whole number; the axis along which the vectors lie; it must be given, unless `dim` is.",
    dim="whole number; an older name of `axis`.",
)
def cosine_distance(
    labels: ArrayLike,
    predictions: ArrayLike,
    axis: int | None = None,
    weights: ArrayLike = 1.0,
    scope: str | None = None,
    loss_collection: str | None = LOSSES,
    reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS,
    dim: int | None = None,
) -> jax.Array:
    """Return the mean of one minus the product of vectors of length 1.

    >>> float(cosine_distance([[1.0, 0.0]], [[0.0, 1.0]], axis=1))
    1.0
    """
    along = dim if axis is None else axis
    if along is None:
        raise InvalidArgumentError("`axis` must be given. Received: axis=None. Write `axis=1`.")
    targets, outputs = _pair(labels, predictions)
    values = 1 - jnp.sum(outputs * targets, axis=along, keepdims=True)
    return compute_weighted_loss(values, weights, scope, loss_collection, reduction)


@TEXTS.with_texts(
    labels="float array of shape `(rows, ...)`; the targets.",
    weights="number, or float array of shape `(rows, 1, ...)`; the factor of each row.",
    returns="The loss, a float array of shape `()`; in a replica, its part of the loss of all replicas.",
    raises={"InvalidArgumentError": "an array is None, or the shapes do not fit each other."},
)
def mean_pairwise_squared_error(
    labels: ArrayLike,
    predictions: ArrayLike,
    weights: ArrayLike = 1.0,
    scope: str | None = None,
    loss_collection: str | None = LOSSES,
) -> jax.Array:
    """Return the sum over examples of the mean squared difference of pairs of an example's differences.

    >>> float(mean_pairwise_squared_error([[0.0, 0.0, 0.0]], [[0.0, 1.0, 2.0]]))
    2.0
    """
    targets, outputs = _pair(labels, predictions)
    difference = outputs - targets
    given = jnp.asarray(weights).astype(difference.dtype)
    check_weights(given, difference)
    axes = tuple(range(1, difference.ndim))
    present = jnp.broadcast_to(given != 0, difference.shape).astype(difference.dtype)
    number = jnp.sum(present, axes, keepdims=True)
    squares = jnp.sum(jnp.square(difference), axes, keepdims=True)
    sums = jnp.square(jnp.sum(difference, axes, keepdims=True))
    pairs = divide(squares, jnp.maximum(number - 1, 0)) - divide(sums, number * (number - 1))
    loss = sum_of_part(2 * pairs * given) * parts()
    add_loss(loss, loss_collection)
    return loss


@ELEMENT_TEXTS.with_texts(
    multi_class_labels="array of any shape; 0 or 1 for each class.",
    logits="float array of the shape of `multi_class_labels`.",
    label_smoothing="number from 0 to 1; how far labels are moved towards 1/2.",
)
def sigmoid_cross_entropy(
    multi_class_labels: ArrayLike,
    logits: ArrayLike,
    weights: ArrayLike = 1.0,
    label_smoothing: float = 0,
    **options: Unpack[LossOptions],
) -> jax.Array:
    """Return the mean cross-entropy of the sigmoids of logits, class by class.

    >>> round(float(sigmoid_cross_entropy([[1, 0]], [[0.0, 0.0]])), 4)
    0.6931
    """
    targets, outputs = _pair(multi_class_labels, logits, "logits", to_float32=False)
    if label_smoothing > 0:
        targets = targets * (1 - label_smoothing) + 0.5 * label_smoothing
    values = sigmoid_losses(targets, outputs)
    return compute_weighted_loss(values, weights, **options)


def sigmoid_losses(labels: jax.Array, logits: jax.Array) -> jax.Array:
    """Return the cross entropy of each logit.

    >>> float(sigmoid_losses(jnp.array([1.0]), jnp.array([-100.0]))[0])
    100.0
    """
    labels = labels.astype(logits.dtype)
    return jnp.maximum(logits, 0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))


@ELEMENT_TEXTS.with_texts(
    onehot_labels="array of shape `(..., classes)`; 0 or 1 for each class.",
    logits="float array of the shape of `onehot_labels`.",
    weights="number, or float array of the shape of `logits` without its last axis; factors of the elements.",
    label_smoothing="number from 0 to 1; how far labels are moved towards one by the number of classes.",
)
def softmax_cross_entropy(
    onehot_labels: ArrayLike,
    logits: ArrayLike,
    weights: ArrayLike = 1.0,
    label_smoothing: float = 0,
    **options: Unpack[LossOptions],
) -> jax.Array:
    """Return the mean cross-entropy of the softmax of logits; labels get no gradient.

    >>> round(float(softmax_cross_entropy([[1, 0]], [[0.0, 0.0]])), 4)
    0.6931
    """
    targets, outputs = _pair(onehot_labels, logits, "logits", to_float32=False)
    if label_smoothing > 0:
        targets = targets * (1 - label_smoothing) + label_smoothing / targets.shape[-1]
    values = -jnp.sum(jax.lax.stop_gradient(targets) * jax.nn.log_softmax(outputs), axis=-1)
    return compute_weighted_loss(values, weights, **options)


@ELEMENT_TEXTS.with_texts(
    labels="array of whole numbers of any shape; classes, counted from 0; a last axis of size 1 is dropped.",
    logits="float array of the shape of `labels` and one axis more, of classes.",
    weights="number, or float array of the shape of `labels`; the factor of each label.",
    returns=f"{TEXTS.returns} It is NaN where a label is not the number of a class.",
)
def sparse_softmax_cross_entropy(
    labels: ArrayLike, logits: ArrayLike, weights: ArrayLike = 1.0, **options: Unpack[LossOptions]
) -> jax.Array:
    """Return the mean cross-entropy of the softmax of logits, for labels that are numbers of classes.

    >>> round(float(sparse_softmax_cross_entropy(labels=[1], logits=[[0.0, 0.0]])), 4)
    0.6931
    """
    targets, outputs = jnp.asarray(_given(labels, "labels")), _floats(_given(logits, "logits"))
    if outputs.ndim == targets.ndim and targets.shape[-1:] == (1,):
        targets = jnp.squeeze(targets, -1)
    if outputs.shape[:-1] != targets.shape or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise InvalidArgumentError(
            "`labels` must be whole numbers, and `logits` have one axis more, of classes. Received: labels "
            f"of shape {targets.shape} and {targets.dtype}, logits of shape {outputs.shape}."
        )
    given = weights
    if np.ndim(weights) == targets.ndim + 1 and np.shape(weights)[-1] == 1:
        given = jnp.squeeze(jnp.asarray(weights), -1)
    classes = outputs.shape[-1]
    chosen = jax.nn.one_hot(targets, classes, dtype=outputs.dtype)
    values = -jnp.sum(chosen * jax.nn.log_softmax(outputs), axis=-1)
    values = jnp.where((targets >= 0) & (targets < classes), values, jnp.nan)
    return compute_weighted_loss(values, given, **options)


def _given(value: ArrayLike, name: str) -> ArrayLike:
    if value is None:
        raise InvalidArgumentError(f"`{name}` must be given. Received: {name}=None.")
    return value


def _floats(value: ArrayLike) -> jax.Array:
    array: jax.Array = keras.ops.convert_to_tensor(value)
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(jnp.float32)


def _pair(
    labels: ArrayLike, outputs: ArrayLike, name: str = "predictions", to_float32: bool = True
) -> tuple[jax.Array, jax.Array]:
    """Return targets and outputs as floating-point arrays of one type."""
    predictions = _floats(_given(outputs, name))
    if to_float32:
        predictions = predictions.astype(jnp.promote_types(predictions.dtype, jnp.float32))
    targets = jnp.asarray(_given(labels, "labels")).astype(predictions.dtype)
    if targets.shape != predictions.shape:
        raise InvalidArgumentError(
            f"`labels` and `{name}` must have the same shape. Received: {targets.shape} and "
            f"{predictions.shape}. Write `reshape` around one of them."
        )
    return targets, predictions
