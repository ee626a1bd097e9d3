"""Names of `tf.python_io`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.tf.adapters._records import (
    TFRecordWriter as TFRecordWriter,
)
