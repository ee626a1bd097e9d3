"""Names of `tf.logging`, for editors and type checkers; `python -m tools.stubs` makes this file."""

import builtins as _b
from unisono.tf.adapters._programs import (
    debug as debug,
    error as error,
    fatal as fatal,
    info as info,
    set_verbosity as set_verbosity,
    warn as warn,
    warning as warning,
)

DEBUG: _b.int
ERROR: _b.int
FATAL: _b.int
INFO: _b.int
WARN: _b.int
