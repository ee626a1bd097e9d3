"""Losses and metrics of classes, beside those of Keras.

Source: https://github.com/tensorflow/estimator (tensorflow_estimator/python/estimator/head)

Tests: tests/unit/estimator/test_heads.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from unisono._errors import InvalidArgumentError


class AccuracyBaseline(keras.metrics.Mean):
    """The accuracy of a model that always says the more frequent of two classes.

    >>> metric = AccuracyBaseline()
    >>> metric.update_state([1.0, 0.0, 0.0, 0.0])
    >>> float(metric.result())
    0.75
    """

    def result(self) -> Any:
        """Return the larger of the labels' mean and its rest."""
        mean = super().result()
        return keras.ops.maximum(mean, 1 - mean)


def sigmoid_losses(labels: jax.Array, logits: jax.Array) -> jax.Array:
    """Return the cross entropy of each logit.

    >>> float(sigmoid_losses(jnp.array([1.0]), jnp.array([-100.0]))[0])
    100.0
    """
    labels = labels.astype(logits.dtype)
    return jnp.maximum(logits, 0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))


class PositiveThresholdAccuracy(keras.metrics.Mean):
    """How often a probability and a label are on the same side of a threshold."""

    def __init__(self, threshold: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._threshold = threshold

    def update_state(
        self, y_true: jax.Array, y_pred: jax.Array, sample_weight: jax.Array | None = None
    ) -> None:
        """Count a batch."""
        equal = (jnp.asarray(y_pred) > self._threshold) == (jnp.asarray(y_true) > 0.5)
        super().update_state(equal.astype(jnp.float32), sample_weight)


def threshold_metrics(thresholds: Sequence[float]) -> dict[str, keras.metrics.Metric]:
    """Return new metrics of thresholds by name.

    >>> list(threshold_metrics([0.5]))[0]
    'accuracy/positive_threshold_0.5'
    """
    made: dict[str, keras.metrics.Metric] = {}
    for number, threshold in enumerate(thresholds):
        end = f"positive_threshold_{threshold:g}"
        made[f"accuracy/{end}"] = PositiveThresholdAccuracy(threshold, name=f"accuracy_at_{number}")
        made[f"precision/{end}"] = keras.metrics.Precision(threshold, name=f"precision_at_{number}")
        made[f"recall/{end}"] = keras.metrics.Recall(threshold, name=f"recall_at_{number}")
    return made


def checked_thresholds(thresholds: Sequence[float] | None) -> tuple[float, ...]:
    """Return thresholds.

    >>> checked_thresholds([0.5])
    (0.5,)
    """
    found = tuple(thresholds or ())
    if not all(0 < threshold < 1 for threshold in found):
        raise InvalidArgumentError(f"thresholds must be between 0 and 1. Received: {thresholds!r}.")
    return found
