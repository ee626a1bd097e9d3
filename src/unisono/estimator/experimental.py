"""Hooks that TensorFlow has in `tf.estimator.experimental`: early stopping, evaluation in between."""

from unisono.estimator.hooks._checkpoints import InMemoryEvaluatorHook
from unisono.estimator.hooks._early_stopping import (
    make_early_stopping_hook,
    stop_if_higher_hook,
    stop_if_lower_hook,
    stop_if_no_decrease_hook,
    stop_if_no_increase_hook,
)

__all__ = [
    "InMemoryEvaluatorHook",
    "make_early_stopping_hook",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
]
