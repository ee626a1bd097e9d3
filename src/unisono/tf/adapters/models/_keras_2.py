"""What Keras 2 has: losses and metrics of `compile` for a `train_step`, and its `LossScaleOptimizer`.

There a program unscales the gradients, and `apply_gradients` does not.

Tests: tests/unit/tf/test_keras.py, tests/unit/tf/test_loss_scale.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import keras

from unisono._system._replacements import Replacement, given
from unisono.step._keras_internals import replace_losses, replaced_losses

#: Marks an optimizer whose next gradients are not scaled.
_IS_UNSCALED = "_unisono_is_unscaled"


def replacements() -> list[Replacement]:
    """Return the methods of Keras 2 that the optimizer gets, and a model's losses and metrics."""
    kind = keras.optimizers.LossScaleOptimizer
    return [
        (keras.Model, "compiled_loss", given(property(CompiledLoss))),
        (keras.Model, "compiled_metrics", given(property(CompiledMetrics))),
        (kind, "get_scaled_loss", given(get_scaled_loss)),
        (kind, "get_unscaled_gradients", given(get_unscaled_gradients)),
        (kind, "apply_gradients", _taking_unscaled),
    ]


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
        """Return the loss, and update the metric `loss`."""
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
        """Count a batch."""
        # Not the model's own, which may call this.
        keras.Model.compute_metrics(self._model, None, y_true, y_pred, sample_weight)


def get_scaled_loss(self: Any, loss: Any) -> Any:
    """Return a loss times the scale."""
    return (lambda: self.scale_loss(loss())) if callable(loss) else self.scale_loss(loss)


def get_unscaled_gradients(self: Any, grads: Sequence[Any]) -> list[Any]:
    """Return gradients divided by the scale; the next `apply_gradients` takes them as they are."""
    vars(self)[_IS_UNSCALED] = True
    scale = self.scale_loss(1.0)
    return [None if gradient is None else gradient / scale for gradient in grads]


def _taking_unscaled(apply_gradients: Callable[..., Any]) -> Callable[..., Any]:
    def applied(self: Any, grads_and_vars: Iterable[tuple[Any, Any]], *args: object, **kwargs: object) -> Any:
        if vars(self).pop(_IS_UNSCALED, False):
            # Keras 3 divides by the scale itself. It is a power of two: nothing is rounded.
            scale = self.scale_loss(1.0)
            grads_and_vars = [(g if g is None else g * scale, v) for g, v in grads_and_vars]
        return apply_gradients(self, grads_and_vars, *args, **kwargs)

    return applied
