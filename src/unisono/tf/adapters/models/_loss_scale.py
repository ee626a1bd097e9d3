"""`LossScaleOptimizer` as Keras 2 had it: the program unscales the gradients, and `apply_gradients` does not.

Tests: tests/unit/tf/test_loss_scale.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

#: Marks an optimizer whose next gradients are not scaled.
_IS_UNSCALED = "_unisono_is_unscaled"


def add_methods() -> None:
    """Give the optimizer its methods of Keras 2."""
    kind: Any = keras.optimizers.LossScaleOptimizer
    if not hasattr(kind, "get_scaled_loss"):
        kind.get_scaled_loss = get_scaled_loss
        kind.get_unscaled_gradients = get_unscaled_gradients
        kind.apply_gradients = _taking_unscaled(kind.apply_gradients)


def get_scaled_loss(self: Any, loss: Any) -> Any:
    """Return a loss times the scale.

    Args:
        self: the optimizer.
        loss: the loss, or a function that returns it.
    """
    return (lambda: self.scale_loss(loss())) if callable(loss) else self.scale_loss(loss)


def get_unscaled_gradients(self: Any, grads: Sequence[Any]) -> list[Any]:
    """Return gradients divided by the scale; the next `apply_gradients` takes them as they are.

    Args:
        self: the optimizer.
        grads: of a scaled loss.
    """
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
