"""Names of `tf.estimator.inputs`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.estimator.inputs import (
    numpy_input_fn as numpy_input_fn,
    pandas_input_fn as pandas_input_fn,
)
