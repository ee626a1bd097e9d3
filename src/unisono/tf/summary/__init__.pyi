"""Names of `tf.summary`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.estimator.summary import (
    merge as merge,
    merge_all as merge_all,
)
from unisono.summary import (
    create_file_writer as create_file_writer,
    create_noop_writer as create_noop_writer,
    record_if as record_if,
)
from unisono.tf.adapters._estimator import (
    histogram as histogram,
    image as image,
    scalar as scalar,
    text as text,
)
from unisono.tf.adapters._tensors import (
    no_op as _unisono_tf_adapters__tensors_no_op,
)
from unisono.tf.summary import (
    experimental as experimental,
)

trace_export = _unisono_tf_adapters__tensors_no_op
trace_off = _unisono_tf_adapters__tensors_no_op
trace_on = _unisono_tf_adapters__tensors_no_op
