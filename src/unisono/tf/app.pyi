"""Names of `tf.app`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from absl import (
    flags as flags,
)
from unisono.tf.adapters._programs import (
    run as run,
)
