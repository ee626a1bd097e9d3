"""Names of `tf.keras.legacy` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.tf.keras.legacy import (
    saving as saving,
)
