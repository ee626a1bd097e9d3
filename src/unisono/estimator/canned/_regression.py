"""Heads of numbers.

Source: https://github.com/tensorflow/estimator (tensorflow_estimator/python/estimator/head)

Tests: tests/unit/estimator/test_heads.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._types import UserValue
from unisono.estimator.canned._head import SUM_OVER_BATCH_SIZE, Head, labels_on_host
from unisono.estimator.canned._texts import TEXTS
from unisono.estimator.losses._functions import sigmoid_losses

if TYPE_CHECKING:
    from unisono.feature_column._numeric import NumericColumn


@TEXTS.with_texts(
    loss_reduction='`"sum_over_batch_size"` (over all numbers) or `"sum"`.',
    inverse_link_fn="function that makes predictions of logits; None for the logits themselves.",
    raises={"InvalidArgumentError": "an example has no number."},
)
class RegressionHead(Head):
    """The head of numbers: the squared error of each.

    >>> RegressionHead(2).logits_dimension
    2
    """

    def __init__(
        self,
        label_dimension: int = 1,
        weight_column: str | NumericColumn | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        loss_fn: Callable[..., Any] | None = None,
        inverse_link_fn: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> None:
        if label_dimension < 1:
            raise InvalidArgumentError(f"label_dimension must be at least 1. Received: {label_dimension}.")
        super().__init__(weight_column, loss_reduction, loss_fn, name)
        self._dimension = label_dimension
        self._inverse_link = inverse_link_fn

    @property
    def logits_dimension(self) -> int:
        """How many numbers an example has."""
        return self._dimension

    @property
    def _label_width(self) -> int:
        """How many numbers an example has."""
        return self._dimension

    def losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        """Return the squared error of each number."""
        return jnp.square(logits - labels.astype(logits.dtype))

    @TEXTS.with_texts(raises={"InvalidArgumentError": "they are strings."})
    def _host_labels(self, labels: object) -> UserValue:
        """Return labels on the host, if they are numbers."""
        array = labels_on_host(labels)
        if array is not None and array.dtype.kind == "O":
            raise InvalidArgumentError(
                f"{type(self).__name__} takes numbers as labels. Received: {array.ravel()[:3].tolist()}."
            )
        return None if array is None else self._checked_range(array)

    def _checked_range(self, labels: np.ndarray) -> np.ndarray:
        return labels

    def predictions(self, logits: jax.Array, keys: Sequence[str] | None = None) -> dict[str, jax.Array]:
        """Return predictions; with an inverse link logits, too.

        Args:
            logits: of shape `(batch, label_dimension)`.
            keys: those that are wanted; all by default.
        """
        logits = self._checked_logits(logits)
        outputs = {"predictions": logits}
        if self._inverse_link is not None:
            outputs = {"predictions": jnp.asarray(self._inverse_link(logits)), "logits": logits}
        return {key: value for key, value in outputs.items() if not keys or key in keys}

    def _own_metrics(self) -> dict[str, keras.metrics.Metric]:
        return {
            "prediction/mean": keras.metrics.Mean(name="prediction_mean"),
            "label/mean": keras.metrics.Mean(name="label_mean"),
        }

    def _batch_values(self, labels: jax.Array, logits: jax.Array) -> dict[str, tuple[jax.Array, ...]]:
        return {"prediction/mean": (self.predictions(logits)["predictions"],), "label/mean": (labels,)}


@TEXTS
class LogisticRegressionHead(RegressionHead):
    """The head of probabilities: the sigmoid, and the cross entropy with labels from 0 to 1.

    >>> LogisticRegressionHead().predictions(jnp.zeros((1, 1)))["predictions"].tolist()
    [[0.5]]
    """

    def __init__(
        self,
        weight_column: str | NumericColumn | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        name: str | None = None,
    ) -> None:
        super().__init__(1, weight_column, loss_reduction, None, jax.nn.sigmoid, name)

    def losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        """Return the cross entropy of each example."""
        return sigmoid_losses(labels, logits)

    def _checked_range(self, labels: np.ndarray) -> np.ndarray:
        if ((labels < 0) | (labels > 1)).any():
            raise InvalidArgumentError(
                "LogisticRegressionHead takes labels from 0 to 1. "
                f"Received: numbers from {labels.min()} to {labels.max()}."
            )
        return labels


@TEXTS.with_texts(compute_full_loss="whether the loss has the constant term, by Stirling's approximation.")
class PoissonRegressionHead(RegressionHead):
    """The head of counts: the exponential, and Poisson's loss.

    >>> PoissonRegressionHead().predictions(jnp.zeros((1, 1)))["predictions"].tolist()
    [[1.0]]
    """

    def __init__(
        self,
        label_dimension: int = 1,
        weight_column: str | NumericColumn | None = None,
        loss_reduction: str = SUM_OVER_BATCH_SIZE,
        compute_full_loss: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(label_dimension, weight_column, loss_reduction, None, jnp.exp, name)
        self._full = compute_full_loss

    def losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        """Return Poisson's loss of each number."""
        labels = labels.astype(logits.dtype)
        losses = jnp.exp(logits) - labels * logits
        if not self._full:
            return losses
        large = jnp.where(labels > 1, labels, 2)
        stirling = large * jnp.log(large) - large + 0.5 * jnp.log(2 * jnp.pi * large)
        return losses + jnp.where(labels > 1, stirling, 0)

    def _checked_range(self, labels: np.ndarray) -> np.ndarray:
        if (labels < 0).any():
            raise InvalidArgumentError(
                f"PoissonRegressionHead takes labels of at least 0. Received: {labels.min()}."
            )
        return labels
