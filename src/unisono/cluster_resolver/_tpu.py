"""The TPU's resolver and initialisation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unisono._errors import BackendError, InvalidTypeError
from unisono._mesh import list_devices, local_devices, resolve_devices
from unisono.cluster_resolver._base import ClusterResolver
from unisono.cluster_resolver._spec import ClusterSpec
from unisono.cluster_resolver._tpu_topology import HardwareFeature, Topology

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True)
class TPUSystemMetadata:
    """How large a TPU is.

    Args:
        num_cores: how many cores there are.
        num_hosts: how many machines.
        num_of_cores_per_host: how many cores each has.
        devices: the cores, in replica order.

    >>> TPUClusterResolver(devices=["cpu:0", "cpu:1"]).get_tpu_system_metadata().num_cores
    2
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    devices: tuple[jax.Device, ...]


class TPUClusterResolver(ClusterResolver):
    """The TPU of this machine, or any devices given by hand.

    Args:
        tpu: None, `""` or `"local"`: the TPU of this machine.
        zone: accepted for TensorFlow's signature, as all below but the last.
        project: likewise.
        job_name: the name of the job.
        coordinator_name: likewise.
        coordinator_address: likewise.
        credentials: likewise.
        service: likewise.
        discovery_url: likewise.
        devices: use these instead; names or `jax.Device`s.

    Raises:
        BackendError: without a TPU, when no devices are given.
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: object = "default",
        service: object = None,
        discovery_url: str | None = None,
        *,
        devices: Sequence[str | jax.Device] | None = None,
    ) -> None:
        self.task_type, self.task_id = job_name, 0
        # Given devices serve to try a TPU program on a machine without one.
        self._devices = resolve_devices(devices) if devices else _local_tpu(tpu)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The cores, in replica order."""
        return self._devices

    @staticmethod
    def connect(
        tpu: str | None = None, zone: str | None = None, project: str | None = None
    ) -> TPUClusterResolver:
        """Return a resolver whose TPU is ready."""
        resolver = TPUClusterResolver(tpu, zone, project)
        experimental_connect_to_cluster(resolver)
        initialize_tpu_system(resolver)
        return resolver

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Return how many cores and machines there are.

        >>> data = TPUClusterResolver(devices=["cpu:0", "cpu:1"]).get_tpu_system_metadata()
        >>> data.num_cores, data.num_hosts, data.num_of_cores_per_host
        (2, 1, 2)
        """
        hosts = len({device.process_index for device in self._devices})
        cores = len(self._devices)
        return TPUSystemMetadata(cores, hosts, cores // hosts, self._devices)

    @property
    def tpu_hardware_feature(self) -> HardwareFeature:
        """What the hardware can do for embeddings."""
        return HardwareFeature()

    def get_master(self) -> str:
        """Return the empty address of this process."""
        return self.master()

    def get_job_name(self) -> str | None:
        """Return the name of the job."""
        return self.task_type

    def get_coordination_service_leader(self) -> str:
        """Return the task whose process coordinates the others."""
        return f"/job:{self.get_job_name()}/task:0"

    def set_tpu_topology(self, serialized_tpu_topology: object) -> None:
        """Do nothing: JAX knows where the cores lie.

        Args:
            serialized_tpu_topology: accepted for TensorFlow's signature.
        """

    def cluster_spec(self) -> ClusterSpec:
        """Return an empty cluster: the TPU belongs to this process."""
        # In TensorFlow the TPU's workers are other processes with addresses; in JAX each owns its cores.
        return ClusterSpec({})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the empty address of this process."""
        return ""

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return the number of cores."""
        return {"TPU": len(self._devices)}


def _local_tpu(tpu: str | None) -> tuple[jax.Device, ...]:
    try:
        # JAX raises RuntimeError for a platform that it does not have.
        return local_devices("tpu")
    except RuntimeError as error:
        raise BackendError(
            f"A TPU must be attached to this machine. Received: tpu={tpu!r}. There are: {list_devices()}. "
            "Run on a TPU machine, or try the program with `TPUClusterResolver(devices=['cpu:0', 'cpu:1'])`."
        ) from error


def experimental_connect_to_cluster(resolver: ClusterResolver) -> None:
    """Do nothing but check: a JAX process owns its TPU from the start.

    Raises:
        InvalidTypeError: when `resolver` is not a cluster resolver.

    >>> experimental_connect_to_cluster(TPUClusterResolver(devices=["cpu:0"]))
    """
    if not isinstance(resolver, ClusterResolver):
        raise InvalidTypeError(
            f"`resolver` must be a cluster resolver. Received: {type(resolver).__name__}. "
            "Pass `TPUClusterResolver()`."
        )


def initialize_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> Topology:
    """Return the topology; JAX has initialized the TPU when its devices were found.

    Args:
        cluster_resolver: which TPU; the local one by default.

    >>> initialize_tpu_system(TPUClusterResolver(devices=["cpu:0", "cpu:1"])).num_tasks
    1
    """
    return Topology((cluster_resolver or TPUClusterResolver()).devices)


def shutdown_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> None:
    """Do nothing: a TPU belongs to its process until that ends.

    Args:
        cluster_resolver: accepted for TensorFlow's signature.

    >>> shutdown_tpu_system(TPUClusterResolver(devices=["cpu:0"]))
    """
