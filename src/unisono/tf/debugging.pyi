"""Names of `tf.debugging`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.tf.adapters._operations import (
    assert_equal as assert_equal,
)
from unisono.tf.adapters._tensors import (
    no_op as _unisono_tf_adapters__tensors_no_op,
)

set_log_device_placement = _unisono_tf_adapters__tensors_no_op
