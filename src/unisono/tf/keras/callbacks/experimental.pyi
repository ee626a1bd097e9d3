"""Names of `tf.keras.callbacks.experimental` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.callbacks import (
    BackupAndRestore as BackupAndRestore,
)
