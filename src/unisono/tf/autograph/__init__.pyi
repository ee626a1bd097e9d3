"""Names of `tf.autograph`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.tf.adapters._tensors import (
    no_op as _unisono_tf_adapters__tensors_no_op,
)
from unisono.tf.autograph import (
    experimental as experimental,
)

set_verbosity = _unisono_tf_adapters__tensors_no_op
trace = _unisono_tf_adapters__tensors_no_op
