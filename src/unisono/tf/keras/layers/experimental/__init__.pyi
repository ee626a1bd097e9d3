"""Names of `tf.keras.layers.experimental` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.tf.adapters._keras import (
    SyncBatchNormalization as SyncBatchNormalization,
)
from unisono.tf.keras.layers.experimental import (
    preprocessing as preprocessing,
)
