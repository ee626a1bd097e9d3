"""Names of `tf.estimator.experimental`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.estimator.experimental import (
    InMemoryEvaluatorHook as InMemoryEvaluatorHook,
    make_early_stopping_hook as make_early_stopping_hook,
    stop_if_higher_hook as stop_if_higher_hook,
    stop_if_lower_hook as stop_if_lower_hook,
    stop_if_no_decrease_hook as stop_if_no_decrease_hook,
    stop_if_no_increase_hook as stop_if_no_increase_hook,
)
