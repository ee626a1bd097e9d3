"""Names that tf.distribute has under `experimental`, for old programs.

Tests: tests/unit/test_tf_names.py.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unisono import partitioners
from unisono._names import no_attribute
from unisono.checkpoint.preemption._handler import PreemptionCheckpointHandler, TerminationConfig
from unisono.checkpoint.preemption._watcher import PreemptionWatcher
from unisono.cluster.strategy import _multi_worker
from unisono.cluster_resolver._base import ClusterResolver
from unisono.cluster_resolver._tpu import DeviceAssignment, TPUClusterResolver
from unisono.collectives._cross_device import CommunicationImplementation, CommunicationOptions
from unisono.data._sharding import ValueContext
from unisono.export import export_saved_model, load_from_saved_model
from unisono.strategies import _tpu
from unisono.strategies._central_storage import CentralStorageStrategy

if TYPE_CHECKING:
    from unisono import coordinator
    from unisono._system._literals import ImplementationName
    from unisono.parameter_server.strategy._parameter_server import ParameterServerStrategy

CollectiveCommunication = CommunicationImplementation


class MultiWorkerMirroredStrategy(_multi_worker.MultiWorkerMirroredStrategy):
    """The old constructor of `unisono.MultiWorkerMirroredStrategy`.

    Args:
        communication: the all-reduce between workers, a `CollectiveCommunication` or its name.
        cluster_resolver: describes the cluster; None reads the environment.

    >>> MultiWorkerMirroredStrategy().num_workers
    1
    """

    def __init__(
        self,
        communication: CommunicationImplementation | ImplementationName = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        super().__init__(cluster_resolver, CommunicationOptions(implementation=communication))


class TPUStrategy(_tpu.TPUStrategy):
    """The old constructor of `unisono.TPUStrategy`.

    Args:
        tpu_cluster_resolver: the TPU; the local one by default.
        device_assignment: the cores that are replicas; all by default.

    >>> from unisono.cluster_resolver import TPUClusterResolver
    >>> TPUStrategy(TPUClusterResolver(devices=["cpu:0", "cpu:1"])).num_replicas_in_sync
    2
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        super().__init__(tpu_cluster_resolver, device_assignment)


def CollectiveHints(  # noqa: N802 (a class in tf.distribute)
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """Return `CommunicationOptions`, under their old name.

    Args:
        bytes_per_pack: the size of a bucket of arrays, in bytes; 0 lets Unisono choose.
        timeout_seconds: the longest time of a collective; None for no limit.

    >>> CollectiveHints(bytes_per_pack=1).bytes_per_pack
    1
    """
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "export_saved_model",
    "load_from_saved_model",
    "partitioners",
]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # Parameter servers need an extra, and the other names do not.
        if name in ("ParameterServerStrategy", "coordinator"):
            return getattr(importlib.import_module("unisono"), name)
        raise no_attribute(__name__, name, __all__)
