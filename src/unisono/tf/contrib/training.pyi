"""Names of `tf.contrib.training`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.estimator import (
    HParams as HParams,
)
