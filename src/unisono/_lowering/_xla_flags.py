"""Options of XLA and of its devices, which are set before JAX starts.

Tests: tests/unit/test_mesh.py.
"""

from __future__ import annotations

import os

import jax

from unisono._mesh import jax_runs


def limit_collectives(seconds: float) -> None:
    """Set the timeout of collectives of CPU devices; to be called before JAX starts.

    Gloo's own timeout is half an hour.

    Args:
        seconds: at least 1.
    """
    name = "xla_cpu_collective_timeout_seconds"
    flags = os.environ.get("XLA_FLAGS", "")
    # A user's own flag wins. The name must be one of this jaxlib's: unknown flags abort the process.
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{name}={max(1, round(seconds))}".strip()


def fuse_results() -> None:
    """Let XLA's CPU backend compute several results in one loop, if JAX has not started.

    An optimizer reads and writes each weight and slot once then. Adam's update of 20 million parameters takes
    29 ms instead of 33.5, with the same bits, and a small one runs in one thread instead of two (2 cores,
    jaxlib 0.10.2, 2026-11-22). It is an option of a process: XLA takes it for no single program.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    # A user's own extra options win. XLA ignores names that it does not know among these.
    if not jax_runs() and "xla_backend_extra_options" not in flags:
        extra = "--xla_backend_extra_options=xla_cpu_use_multi_output_fusion"
        os.environ["XLA_FLAGS"] = f"{flags} {extra}".strip()


def stay_on_cpus() -> None:
    """Keep JAX from other devices than CPUs, if it has not started: it takes most of each GPU's memory."""
    if not jax_runs():
        jax.config.update("jax_platforms", "cpu")
