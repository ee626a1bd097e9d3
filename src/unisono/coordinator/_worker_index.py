"""Which worker runs this code.

Tests: tests/virtual/test_coordinator.py.
"""

from __future__ import annotations

from unisono.ps.worker._step_worker import current_worker_index


def get_current_worker_index() -> int:
    """Return the number of the worker that runs this code.

    Call it in a function that is given to `ClusterCoordinator.create_per_worker_dataset`.

    Raises:
        ContextError: outside of a worker's functions.
    """
    return current_worker_index()
