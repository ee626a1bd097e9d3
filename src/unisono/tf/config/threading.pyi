"""Names of `tf.config.threading`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.tf.adapters._tensors import (
    no_op as _unisono_tf_adapters__tensors_no_op,
)

set_inter_op_parallelism_threads = _unisono_tf_adapters__tensors_no_op
set_intra_op_parallelism_threads = _unisono_tf_adapters__tensors_no_op
