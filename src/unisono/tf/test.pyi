"""Names of `tf.test`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.tf.adapters._config import (
    is_gpu_available as is_gpu_available,
)
