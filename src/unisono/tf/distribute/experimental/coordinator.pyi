"""Names of `tf.distribute.experimental.coordinator`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.coordinator import (
    ClusterCoordinator as ClusterCoordinator,
    PerWorkerValue as PerWorkerValue,
    PerWorkerValues as PerWorkerValues,
    RemoteValue as RemoteValue,
    experimental_get_current_worker_index as experimental_get_current_worker_index,
)
