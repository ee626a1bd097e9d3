"""A mesh of replicas of several devices each.

Tests: tests/unit/model_parallel/test_replica_grid.py, tests/virtual/strategies/test_replica_grid.py.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from unisono._checks import whole_number
from unisono._errors import InvalidArgumentError
from unisono._mesh import AXIS, ReplicaMesh
from unisono._types import ArrayLike
from unisono.model_parallel._first_values import made
from unisono.step._value_handle import DeferredValue

#: The name of the mesh axis along which the devices of a replica lie.
MODEL_AXIS = "model"


@dataclasses.dataclass(frozen=True)
class ReplicaGrid(ReplicaMesh):
    """The devices of a strategy, several for each replica, as a JAX mesh with two axes.

    Args:
        devices: of the first replica, then of the second, and so on.
        size: how many each has.

    Raises:
        InvalidArgumentError: the devices do not divide.
    """

    size: int

    def __post_init__(self) -> None:
        if whole_number(self.size, 1) is None:
            raise InvalidArgumentError(
                "`devices_per_replica` must be a whole number, 1 or more. Received: "
                f"devices_per_replica={self.size!r}. Leave it out for replicas of one device."
            )
        if len(self.devices) % self.size:
            raise InvalidArgumentError(
                f"Replicas of {self.size} devices need a multiple of {self.size} devices. Received: "
                f"{len(self.devices)} devices, {', '.join(map(str, self.devices))}. Write "
                f"`devices_per_replica={_divisor(len(self.devices), self.size)}`, or name other `devices`."
            )
        self._check_processes()

    def _check_processes(self) -> None:
        """Raise where a replica has some devices of a process, and others of another one."""
        count = collections.Counter(d.process_index for d in self.devices)
        for number in range(self.num_replicas):
            processes = self._processes_of(number)
            is_within = len(processes) == 1 or sum(count[p] for p in processes) == self.size
            if is_within and len(processes) == self.processes_per_replica:
                continue
            raise InvalidArgumentError(
                "The devices of a replica must belong to one process, or be all devices of several, as many "
                f"for each replica. Received: devices_per_replica={self.size}, which gives "
                f"replica {number} devices of the processes {processes}, which have "
                f"{', '.join(str(count[p]) for p in processes)}. Choose a number that divides the devices of "
                "each process, or a multiple of these, with as many devices for each process."
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
    def processes_per_replica(self) -> int:
        return len(self._processes_of(0))

    def _processes_of(self, number: int) -> list[int]:
        return sorted({d.process_index for d in self.devices_of(number)})

    @functools.cached_property
    def local_replicas(self) -> tuple[int, ...]:
        own = jax.process_index()
        return tuple(i for i in range(self.num_replicas) if own in self._processes_of(i))

    @functools.cached_property
    def local_devices(self) -> tuple[jax.Device, ...]:
        own = jax.process_index()
        return tuple(d for d in self.devices if d.process_index == own)

    @functools.cached_property
    def one_each(self) -> ReplicaMesh:
        return ReplicaMesh(self.devices) if self.processes_per_replica > 1 else self

    @functools.cached_property
    def results(self) -> NamedSharding | None:
        return self.replicated if self.processes_per_replica > 1 else None

    def devices_of(self, number: int) -> tuple[jax.Device, ...]:
        return self.devices[number * self.size : (number + 1) * self.size]

    def place_of(self, number: int) -> jax.Device | jax.sharding.Sharding:
        # Of several processes each has a copy of its own, which `put` copies to its other devices.
        if self.processes_per_replica > 1:
            return self.local_devices[0]
        return NamedSharding(self.mesh_of(number), PartitionSpec())

    def copies(self, value: ArrayLike) -> tuple[ArrayLike, ...]:
        # What lies in parts on several processes is a `SpannedParts`, which is made whole to be read.
        if not self._lies_here(value) or self.processes_per_replica > 1:
            return (self.local(value),) * len(self.local_replicas)
        on = {s.device: s.data for s in value.addressable_shards}
        copies = []
        for number in self.local_replicas:
            lies = NamedSharding(self.mesh_of(number), _spec_of(value))
            parts = [on[d] for d in self.devices_of(number)]
            copies.append(jax.make_array_from_single_device_arrays(value.shape, lies, parts))
        return tuple(copies)

    def put_own(self, value: np.generic) -> jax.Array:
        if self.processes_per_replica == 1:
            return super().put_own(value)
        # Processes of one replica say different things, too: an element for each device.
        of_devices = NamedSharding(self.mesh, PartitionSpec((AXIS, MODEL_AXIS)))
        shape = (len(self.devices),)
        return jax.make_array_from_callback(shape, of_devices, lambda index: np.full(1, value))

    def local(self, array: jax.Array) -> jax.Array:
        """Return this process' copy of an array, which may be the parts of its first replica."""
        if self.processes_per_replica > 1:
            return super().local(array)
        is_cut = self.spans_processes and self._lies_here(array) and not array.is_fully_replicated
        # What is split over the replicas stays as it is.
        if not is_cut or AXIS in jax.tree.leaves(tuple(_spec_of(array))):
            return super().local(array)
        copy: jax.Array = self.copies(array)[0]
        return copy

    def _put_on_processes(self, value: object, sharding: NamedSharding) -> jax.Array:
        if isinstance(value, jax.Array) and value.is_fully_addressable:
            held = value.sharding
            # In parts on one replica of this process, as `local` returns it.
            if (
                isinstance(held, NamedSharding)
                and held.spec == sharding.spec
                and not held.is_fully_replicated
            ):
                return self.spread(value, sharding)
        return super()._put_on_processes(value, sharding)

    def spread(self, value: jax.Array, sharding: NamedSharding) -> jax.Array:
        """Return an array on all replicas whose parts are on the devices of one replica of this process.

        Args:
            value: the same on all processes.
            sharding: how it lies on all devices.
        """
        on = {s.device: s.data for s in value.addressable_shards}
        held: Any = value.sharding
        ordered = [on[d] for d in held.mesh.devices.flat]
        parts = [
            jax.device_put(part, device)
            for number in self.local_replicas
            for part, device in zip(ordered, self.devices_of(number), strict=True)
        ]
        return jax.make_array_from_single_device_arrays(value.shape, sharding, parts)

    def _lies_here(self, value: object) -> bool:
        """Return whether a value is an array on the devices of all replicas."""
        if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
            return False
        return isinstance(value.sharding, NamedSharding) and value.sharding.mesh == self.mesh

    @staticmethod
    def made(value: DeferredValue, sharding: NamedSharding) -> jax.Array:
        """Return a first value that lies so; in one program, so that the whole is on no device."""
        return made(value, sharding)

    def mesh_of(self, number: int) -> Mesh:
        """Return the devices of one replica as a mesh."""
        return Mesh(np.array(self.devices_of(number)), (MODEL_AXIS,))


def _spec_of(array: jax.Array) -> PartitionSpec:
    """Return how an array with a `NamedSharding` lies."""
    sharding: Any = array.sharding
    spec: PartitionSpec = sharding.spec
    return spec


def _divisor(count: int, size: int) -> int:
    """Return the largest number up to `size` that divides a number of devices."""
    return next(n for n in range(min(size, count), 0, -1) if count % n == 0)
