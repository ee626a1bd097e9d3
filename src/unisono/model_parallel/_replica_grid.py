"""A mesh of replicas of several devices each.

Tests: tests/virtual/strategies/test_model_parallel.py.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from unisono._errors import InvalidArgumentError
from unisono._mesh import AXIS, ReplicaMesh
from unisono._types import ArrayLike

#: The name of the mesh axis along which the devices of a replica lie.
MODEL_AXIS = "model"


@dataclasses.dataclass(frozen=True)
class ReplicaGrid(ReplicaMesh):
    """The devices of a strategy, several for each replica, as a JAX mesh with two axes.

    Args:
        devices: those of the first replica, then those of the second, and so on.
        size: how many each has.

    Raises:
        InvalidArgumentError: the devices do not divide.
    """

    size: int

    def __post_init__(self) -> None:
        if len(self.devices) % self.size:
            raise InvalidArgumentError(
                f"Replicas of {self.size} devices need a multiple of {self.size} devices. Received: "
                f"{len(self.devices)} devices, {', '.join(map(str, self.devices))}. Write "
                f"`devices_per_replica={_divisor(len(self.devices), self.size)}`, or name other `devices`."
            )

    @property
    def devices_per_replica(self) -> int:
        return self.size

    @functools.cached_property
    def mesh(self) -> Mesh:
        shape = self.num_replicas, self.size
        return Mesh(
            np.array(self.devices).reshape(shape), (AXIS, MODEL_AXIS), axis_types=(AxisType.Auto,) * 2
        )

    @property
    def num_replicas(self) -> int:
        return len(self.devices) // self.size

    @functools.cached_property
    def local_replicas(self) -> tuple[int, ...]:
        own = jax.process_index()
        return tuple(
            i for i in range(self.num_replicas) if all(d.process_index == own for d in self._devices_of(i))
        )

    @functools.cached_property
    def local_devices(self) -> tuple[jax.Device, ...]:
        own = jax.process_index()
        return tuple(d for d in self.devices if d.process_index == own)

    def _devices_of(self, number: int) -> tuple[jax.Device, ...]:
        return self.devices[number * self.size : (number + 1) * self.size]

    def put_on_replica(self, value: ArrayLike, number: int) -> ArrayLike:
        return jax.device_put(value, NamedSharding(self._mesh_of(number), PartitionSpec()))

    def copies(self, value: ArrayLike) -> tuple[ArrayLike, ...]:
        sharding = getattr(value, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self.mesh:
            return (value,) * len(self.local_replicas)
        on = {s.device: s.data for s in value.addressable_shards}
        found = []
        for number in self.local_replicas:
            devices = self._devices_of(number)
            lies = NamedSharding(self._mesh_of(number), sharding.spec)
            found.append(
                jax.make_array_from_single_device_arrays(value.shape, lies, [on[d] for d in devices])
            )
        return tuple(found)

    def _mesh_of(self, number: int) -> Mesh:
        """The devices of one replica."""
        return Mesh(np.array(self._devices_of(number)), (MODEL_AXIS,))


def _divisor(count: int, size: int) -> int:
    """Return the largest number up to `size` that divides a number of devices."""
    return next(n for n in range(min(size, count), 0, -1) if count % n == 0)
