"""Where a TPU's cores lie, and which of them are replicas.

Tests: tests/unit/test_tpu.py.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from unisono._errors import InvalidArgumentError, InvalidTypeError

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
    def device_coordinates(self) -> np.ndarray:
        """The places of all cores, of shape `(tasks, cores per task, 4)`."""
        places = [coordinates_of(device, i) for i, device in enumerate(self.devices)]
        return np.array(places, np.int32).reshape(self.num_tasks, -1, self.mesh_rank)


def coordinates_of(device: jax.Device, number: int) -> tuple[int, ...]:
    """Return the place of a device; of one that is not a TPU core, its number along x."""
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
    """Which cores of a TPU are the replicas.

    Args:
        topology: as `initialize_tpu_system` returns it.
        core_assignment: places of shape `(replicas, 1, 4)`: a replica is one core.

    Raises:
        InvalidTypeError: when `topology` is not a `Topology`.
        InvalidArgumentError: for another shape, several cores in a replica, or a place without a core.

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
                f"`core_assignment` must have the shape (replicas, 1, {topology.mesh_rank}). Received: shape "
                f"{places.shape}. Write `DeviceAssignment.build(topology, num_replicas=2)`, for example."
            )
        # A strategy maps replicas to devices one by one: models over several cores are not supported.
        if places.shape[1] != 1:
            raise InvalidArgumentError(
                f"A replica is one core. Received: {places.shape[1]} cores per replica. Split the cores into "
                "replicas of one core each: `DeviceAssignment.build(topology, num_replicas=...)`."
            )
        self.topology, self.core_assignment = topology, places

    @property
    def num_replicas(self) -> int:
        """How many replicas there are."""
        return int(self.core_assignment.shape[0])

    @property
    def num_cores_per_replica(self) -> int:
        """How many cores a replica has: one."""
        return 1

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The cores, in replica order.

        Raises:
            InvalidArgumentError: for a place without a core.
        """
        every = {coordinates_of(d, i): d for i, d in enumerate(self.topology.devices)}
        found = []
        for place in self.core_assignment[:, 0].tolist():
            if tuple(place) not in every:
                raise InvalidArgumentError(
                    f"Each place must have a core. Received: {place}. There are: {sorted(every)}."
                )
            found.append(every[tuple(place)])
        return tuple(found)

    @classmethod
    def build(
        cls,
        topology: Topology,
        computation_shape: Sequence[int] | None = None,
        computation_stride: Sequence[int] | None = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> DeviceAssignment:
        """Return an assignment of the first cores.

        Args:
            topology: as `initialize_tpu_system` returns it.
            computation_shape: cores of a replica along each dimension; all 1.
            computation_stride: accepted for TensorFlow's signature.
            num_replicas: how many cores.
            device_order_mode: accepted for it, too.

        Raises:
            InvalidArgumentError: for replicas of several cores, or more replicas than cores.
        """
        if computation_shape is not None and any(size != 1 for size in computation_shape):
            raise InvalidArgumentError(
                f"A replica is one core. Received: computation_shape={computation_shape!r}. Leave it out."
            )
        cores = topology.device_coordinates.reshape(-1, 1, topology.mesh_rank)
        if not 1 <= num_replicas <= len(cores):
            raise InvalidArgumentError(
                f"`num_replicas` must be from 1 to {len(cores)}. Received: num_replicas={num_replicas}."
            )
        return cls(topology, cores[:num_replicas])


class HardwareFeature:
    """What a TPU's hardware can do for embeddings: JAX uses none of it."""

    class EmbeddingFeature(enum.Enum):
        """Generations of TensorFlow's embedding engine."""

        UNSUPPORTED = "UNSUPPORTED"
        V1 = "V1"
        V2 = "V2"

    embedding_feature = EmbeddingFeature.UNSUPPORTED
    num_embedding_devices_per_chip = 0
