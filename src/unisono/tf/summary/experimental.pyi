"""Names of `tf.summary.experimental`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.summary import (
    get_step as get_step,
    set_step as set_step,
)
