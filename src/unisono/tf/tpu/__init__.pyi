"""Names of `tf.tpu`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.tf.tpu import (
    experimental as experimental,
)
