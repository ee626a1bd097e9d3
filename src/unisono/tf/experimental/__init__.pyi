"""Names of `tf.experimental`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.tf.experimental import (
    numpy as numpy,
)
