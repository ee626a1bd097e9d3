"""Names of `tf.experimental.numpy`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from jax.numpy import *
from unisono.tf.adapters._tensors import (
    no_op as _unisono_tf_adapters__tensors_no_op,
)

experimental_enable_numpy_behavior = _unisono_tf_adapters__tensors_no_op
