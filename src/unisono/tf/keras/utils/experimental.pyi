"""Names of `tf.keras.utils.experimental` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.data import (
    DatasetCreator as DatasetCreator,
)
