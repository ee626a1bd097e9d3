"""Which worker runs this code.

Tests: tests/virtual/test_coordinator.py.
"""

from __future__ import annotations

import jax

from unisono.ps.worker._step_worker import current_worker_index
from unisono.training.remote_step.programs._function_step import traced_worker_index


def get_current_worker_index() -> int | jax.Array:
    """Return the number of the worker that runs this code.

    In a function that is given to `ClusterCoordinator.create_per_worker_dataset` it is an int. In a scheduled
    function, whose program is the same on all workers, it is a scalar array of that program.

    Raises:
        ContextError: outside of a worker's functions.
    """
    traced = traced_worker_index()
    return current_worker_index() if traced is None else traced
