"""Names of `tf.config.optimizer`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.tf.adapters._tensors import (
    no_op as _unisono_tf_adapters__tensors_no_op,
)

set_experimental_options = _unisono_tf_adapters__tensors_no_op
set_jit = _unisono_tf_adapters__tensors_no_op
