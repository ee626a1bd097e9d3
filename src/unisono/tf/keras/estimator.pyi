"""Names of `tf.keras.estimator` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.estimator import (
    model_to_estimator as model_to_estimator,
)
