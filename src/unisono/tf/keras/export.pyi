"""Names of `tf.keras.export` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.export import (
    ExportArchive as ExportArchive,
)
