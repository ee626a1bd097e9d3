"""The public names of `unisono.coordinator`; they are loaded when they are first used."""

from unisono.coordinator._coordinator import ClusterCoordinator as ClusterCoordinator
from unisono.coordinator._values import (
    PerWorkerValues as PerWorkerValues,
    RemoteValue as RemoteValue,
    get_current_worker_index as get_current_worker_index,
)

PerWorkerValue = PerWorkerValues
experimental_get_current_worker_index = get_current_worker_index
