"""Names of `tf.profiler.experimental.server`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from jax.profiler import (
    start_server as _jax_profiler_start_server,
)

start = _jax_profiler_start_server
