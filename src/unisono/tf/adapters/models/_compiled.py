"""The losses and metrics of `compile`, as a `train_step` of Keras 2 calls them.

Tests: tests/unit/tf/test_keras.py.
"""

from __future__ import annotations

from typing import Any

import jax
import keras

from unisono.step._keras_internals import replace_losses, replaced_losses


class CompiledLoss:
    """The losses that `compile` was given, as a `train_step` of Keras 2 calls them."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """The metric `loss`, which each call updates."""
        return [metric for metric in self._model.metrics if metric.name == "loss"]

    def __call__(
        self, y_true: Any, y_pred: Any, sample_weight: Any = None, regularization_losses: Any = None
    ) -> Any:
        """Return the loss, and update the metric `loss`.

        Args:
            y_true: what the predictions should be.
            y_pred: the predictions.
            sample_weight: the weight of each row.
            regularization_losses: what is added: `self.losses`.
        """
        model = self._model
        # Without what layers add: a program passes that itself.
        before = replaced_losses(model)
        replace_losses(model, [keras.ops.zeros(())])
        try:
            # Not the model's own, which may call this.
            loss = keras.Model.compute_loss(model, None, y_true, y_pred, sample_weight)
        finally:
            replace_losses(model, before)
        for added in regularization_losses or ():
            loss = loss + keras.ops.sum(added)
        rows = jax.tree.leaves(y_pred)[0].shape[0]
        for metric in self.metrics:
            metric.update_state(loss, sample_weight=rows)
        return loss


class CompiledMetrics:
    """The metrics that `compile` was given, as a `train_step` of Keras 2 calls them."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count a batch.

        Args:
            y_true: what the predictions should be.
            y_pred: the predictions.
            sample_weight: the weight of each row.
        """
        # Not the model's own, which may call this.
        keras.Model.compute_metrics(self._model, None, y_true, y_pred, sample_weight)
