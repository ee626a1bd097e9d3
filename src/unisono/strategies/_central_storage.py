"""`CentralStorageStrategy`: one copy of the state in one place, all devices compute."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from unisono._mesh import ReplicaMesh, resolve_devices
from unisono.step._layout import CentralLayout
from unisono.strategies._replicated import ReplicatedStrategy


class CentralStorageStrategy(ReplicatedStrategy):
    """Variables and optimizer state live once, on the parameter device or in host memory.

    Each step brings them to the devices that compute and takes the new ones back: slower than
    `MirroredStrategy`, and between steps the devices' memory is free.

    Args:
        compute_devices: the devices that compute, as for `MirroredStrategy`.
        parameter_device: where the state lives: a device, or `"host"` for the pinned memory of
            the host beside the first device. The first CPU device by default; with one compute
            device, that device.

    >>> strategy = CentralStorageStrategy(["cpu:0", "cpu:1"], parameter_device="cpu:0")
    >>> strategy.num_replicas_in_sync
    2
    """

    def __init__(
        self,
        compute_devices: Sequence[str | jax.Device] | None = None,
        parameter_device: str | jax.Device | None = None,
    ) -> None:
        devices = resolve_devices(compute_devices)
        super().__init__(ReplicaMesh(devices))
        # As tf.distribute does: of one device the state is there, of several the host has it.
        if parameter_device is None:
            parameter_device = devices[0] if len(devices) == 1 else "cpu:0"
        if parameter_device == "host":
            home = jax.sharding.SingleDeviceSharding(devices[0], memory_kind="pinned_host")
            self._parameter_devices = (devices[0],)
        else:
            self._parameter_devices = resolve_devices([parameter_device])
            home = jax.sharding.SingleDeviceSharding(self._parameter_devices[0])
        self._state_layout = CentralLayout(self._mesh, home)

    #: The state returns to its one place after each step.
    _runs_ahead = False

    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """The device on which variables live."""
        return self._parameter_devices
