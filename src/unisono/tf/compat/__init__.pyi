"""Names of `tf.compat`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.tf.adapters._programs import (
    as_bytes as as_bytes,
    as_str as as_str,
    as_str_any as as_str_any,
    as_text as as_text,
)
from unisono.tf.compat import (
    v1 as v1,
    v2 as v2,
)
