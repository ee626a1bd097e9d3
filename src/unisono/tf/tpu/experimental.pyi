"""Names of `tf.tpu.experimental`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.tpu.experimental import (
    initialize_tpu_system as initialize_tpu_system,
    shutdown_tpu_system as shutdown_tpu_system,
)
