"""Names of `tf.autograph.experimental`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.tf.adapters._tensors import (
    no_op as _unisono_tf_adapters__tensors_no_op,
    same as _unisono_tf_adapters__tensors_same,
)

do_not_convert = _unisono_tf_adapters__tensors_same
set_loop_options = _unisono_tf_adapters__tensors_no_op
