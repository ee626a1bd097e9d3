"""The TPU's resolver and initialisation; where its cores lie, and which of them are replicas.

Tests: tests/unit/test_tpu.py.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from unisono._errors import BackendError, InvalidArgumentError, InvalidTypeError
from unisono._mesh import list_devices, local_devices, resolve_devices
from unisono.cluster_resolver._base import ClusterResolver
from unisono.cluster_resolver._spec import ClusterSpec

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True)
class Topology:
    """The cores of an initialized TPU and where they are.

    Args:
        devices: its cores.

    >>> from unisono.spi import resolve_devices
    >>> Topology(resolve_devices(["cpu:0", "cpu:1"])).num_tasks
    1
    """

    devices: tuple[jax.Device, ...]

    @property
    def num_tasks(self) -> int:
        """How many machines there are."""
        return len({device.process_index for device in self.devices})

    @property
    def num_tpus_per_task(self) -> int:
        """How many cores each has."""
        return len(self.devices) // self.num_tasks

    num_tpu_devices_per_task = num_tpus_per_task

    @property
    def mesh_rank(self) -> int:
        """How many numbers a place has: x, y, z, and the core on the chip."""
        # As TensorFlow's topologies: three numbers of the chip, one of the core on it.
        return 4

    @property
    def mesh_shape(self) -> np.ndarray:
        """How many places there are in each dimension."""
        shape: np.ndarray = self.device_coordinates.reshape(-1, self.mesh_rank).max(axis=0) + 1
        return shape

    @property
    def _is_line(self) -> bool:
        """True if the devices are no TPU cores, and have numbers along x alone."""
        return not any(hasattr(device, "coords") for device in self.devices)

    @property
    def device_coordinates(self) -> np.ndarray:
        """The places of all cores, of shape `(tasks, cores per task, 4)`."""
        places = [coordinates_of(device, i) for i, device in enumerate(self.devices)]
        return np.array(places, np.int32).reshape(self.num_tasks, -1, self.mesh_rank)


def coordinates_of(device: jax.Device, number: int) -> tuple[int, ...]:
    """Return the place of a device; its number along x if it is no TPU core."""
    # Only JAX's TPU devices have `coords`; others serve to try programs without a TPU.
    coordinates = getattr(device, "coords", None)
    if coordinates is None:
        return (number, 0, 0, 0)
    return (*(int(x) for x in coordinates), int(getattr(device, "core_on_chip", 0)))


class DeviceOrderMode(enum.IntEnum):
    """In which order replicas lie on the cores; XLA chooses, whatever is given."""

    AUTO = 0
    RING = 1
    MESH = 2


class DeviceAssignment:
    """Which cores of a TPU are the replicas, one or several for each.

    Args:
        topology: as `initialize_tpu_system` returns it.
        core_assignment: places of shape `(replicas, cores per replica, 4)`. The cores of a replica are its
            logical devices, in this order.

    Raises:
        InvalidTypeError: when `topology` is not a `Topology`.
        InvalidArgumentError: for another shape.

    >>> from unisono.spi import resolve_devices
    >>> topology = Topology(resolve_devices(["cpu:0", "cpu:1"]))
    >>> DeviceAssignment.build(topology, num_replicas=2).num_replicas
    2
    """

    def __init__(self, topology: Topology, core_assignment: ArrayLike) -> None:
        if not isinstance(topology, Topology):
            raise InvalidTypeError(
                f"`topology` must be a `Topology`. Received: topology={topology!r}. Pass what "
                "`unisono.tpu.experimental.initialize_tpu_system(resolver)` returns."
            )
        places = np.asarray(core_assignment, np.int32)
        if places.ndim != 3 or places.shape[2] != topology.mesh_rank or not places.size:
            raise InvalidArgumentError(
                f"`core_assignment` must have the shape (replicas, cores per replica, {topology.mesh_rank}). "
                f"Received: shape {places.shape}. Write `DeviceAssignment.build(topology, num_replicas=2)`, "
                "for example."
            )
        self.topology, self.core_assignment = topology, places

    @property
    def num_replicas(self) -> int:
        """How many replicas there are."""
        return int(self.core_assignment.shape[0])

    @property
    def num_cores_per_replica(self) -> int:
        """How many cores a replica has."""
        return int(self.core_assignment.shape[1])

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The cores of the first replica, then of the second, and so on.

        Raises:
            InvalidArgumentError: for a place without a core, or a place given twice.
        """
        every = {coordinates_of(d, i): d for i, d in enumerate(self.topology.devices)}
        devices = []
        for place in self.core_assignment.reshape(-1, self.topology.mesh_rank).tolist():
            if tuple(place) not in every:
                raise InvalidArgumentError(
                    f"Each place must have a core. Received: {place}. There are: {sorted(every)}."
                )
            devices.append(every[tuple(place)])
            if devices.count(devices[-1]) > 1:
                raise InvalidArgumentError(
                    f"A core must be in one replica, once. Received: {place} twice. There are: "
                    f"{sorted(every)}."
                )
        return tuple(devices)

    @classmethod
    def build(
        cls,
        topology: Topology,
        computation_shape: Sequence[int] | None = None,
        computation_stride: Sequence[int] | None = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> DeviceAssignment:
        """Return an assignment of blocks of neighbouring cores.

        Devices that are no TPU cores, with which a program is tried, have no neighbours: a replica gets as
        many consecutive ones as its block has cores, whatever the form of the block.

        Args:
            topology: as `initialize_tpu_system` returns it.
            computation_shape: how many cores a replica has along each of the 4 dimensions; all 1 by default.
            computation_stride: how far apart these are; all 1 by default.
            num_replicas: how many blocks.
            device_order_mode: accepted for TensorFlow's signature.

        Raises:
            InvalidArgumentError: for sizes that are not positive, or blocks that do not fit.

        >>> topology = initialize_tpu_system(TPUClusterResolver(devices=["cpu:0", "cpu:1"]))
        >>> DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2]).num_cores_per_replica
        2
        """
        shape = _sizes("computation_shape", computation_shape, topology)
        stride = _sizes("computation_stride", computation_stride, topology)
        mesh = topology.mesh_shape
        if topology._is_line:
            fitting = len(topology.devices) // int(shape.prod())
        else:
            fitting = int((mesh // (shape * stride) * stride).prod())
        if not 1 <= num_replicas <= fitting:
            raise InvalidArgumentError(
                f"`num_replicas` must be from 1 to {fitting}: so many replicas with computation_shape="
                f"{shape.tolist()} and computation_stride={stride.tolist()} fit in a TPU mesh of shape "
                f"{mesh.tolist()}. Received: num_replicas={num_replicas}. Write a smaller number or shape."
            )
        if topology._is_line:
            cores = topology.device_coordinates.reshape(-1, topology.mesh_rank)
            return cls(topology, cores[: num_replicas * shape.prod()].reshape(num_replicas, -1, mesh.size))
        return cls(topology, _blocks(mesh, shape, stride, num_replicas))


def _sizes(name: str, given: Sequence[int] | None, topology: Topology) -> np.ndarray:
    """Return a number for each dimension of a topology."""
    rank = topology.mesh_rank
    sizes = np.asarray([1] * rank if given is None else given, np.int32)
    if sizes.shape != (rank,) or (sizes < 1).any():
        raise InvalidArgumentError(
            f"`{name}` must have a positive number for each of the {rank} dimensions of the topology. "
            f"Received: {name}={given!r}. Write {[1] * (rank - 1) + [2]}, for example."
        )
    return sizes


def _blocks(mesh: np.ndarray, shape: np.ndarray, stride: np.ndarray, count: int) -> np.ndarray:
    """Return the places of replicas whose cores are blocks of a mesh: `(replicas, cores, dimensions)`.

    As TensorFlow's `device_assignment` without rings: replicas are packed as close to a cube as possible, and
    are counted over the cores of a chip first.
    """
    footprint, rank = shape * stride, mesh.size
    limits = (mesh // footprint * stride).tolist()
    replicas, remaining = [0] * rank, count
    # The most limited dimension first; of equal ones the cores of a chip, then x, y and z.
    order = sorted(range(rank), key=lambda i: (limits[i], (i + 1) % rank))
    for left, i in zip(range(rank, 0, -1), order, strict=True):
        replicas[i] = min(math.ceil(remaining ** (1 / left)), limits[i])
        remaining = -(-remaining // replicas[i])
    within = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1).reshape(-1, rank) * stride
    counted = np.unravel_index(np.arange(count), [*reversed(replicas[:-1]), replicas[-1]])
    places = np.stack([*reversed(counted[:-1]), counted[-1]], -1)
    starts = places // stride * footprint + places % stride
    return np.asarray(starts[:, None] + within[None], np.int32)


class HardwareFeature:
    """Features of a TPU's hardware for embeddings: JAX uses none of them.

    `embedding_feature` is `EmbeddingFeature.UNSUPPORTED`, and `num_embedding_devices_per_chip` is 0.
    """

    class EmbeddingFeature(enum.Enum):
        """Generations of TensorFlow's embedding engine."""

        UNSUPPORTED = "UNSUPPORTED"
        V1 = "V1"
        V2 = "V2"

    embedding_feature = EmbeddingFeature.UNSUPPORTED
    num_embedding_devices_per_chip = 0


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
        """The hardware's features for embeddings."""
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
