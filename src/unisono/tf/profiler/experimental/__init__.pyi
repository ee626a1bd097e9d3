"""Names of `tf.profiler.experimental`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from jax.profiler import (
    start_trace as _jax_profiler_start_trace,
    stop_trace as _jax_profiler_stop_trace,
    trace as _jax_profiler_trace,
)
from unisono.tf.profiler.experimental import (
    server as server,
)

Profile = _jax_profiler_trace
start = _jax_profiler_start_trace
stop = _jax_profiler_stop_trace
