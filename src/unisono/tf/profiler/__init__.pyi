"""Names of `tf.profiler`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.tf.profiler import (
    experimental as experimental,
)
