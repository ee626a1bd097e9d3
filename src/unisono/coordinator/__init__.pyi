"""The public names of `unisono.coordinator`; they are loaded when they are first used."""

from unisono.parameter_server.strategy._coordinator import (
    ClusterCoordinator as ClusterCoordinator,
    PerWorkerValues as PerWorkerValues,
    RemoteValue as RemoteValue,
    get_current_worker_index as get_current_worker_index,
)

PerWorkerValue = PerWorkerValues
experimental_get_current_worker_index = get_current_worker_index
