"""`MirroredStrategy`: synchronous training on the devices of one machine.

Tests: tests/virtual/strategies/test_contract.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax

from unisono._checks import check_instance
from unisono._features import load
from unisono._mesh import resolve_devices
from unisono.collectives._cross_device import CrossDeviceOps, own_ops
from unisono.step._layout import Synchronization
from unisono.strategies._base import Strategy
from unisono.strategies._replicated import ReplicatedStrategy, layout_of, mesh_of
from unisono.training._scope_warnings import strategy_of_process_made

if TYPE_CHECKING:
    from unisono._system._literals import StateLayoutName
    from unisono.model_parallel._layout_rules import LayoutMap


class MirroredStrategy(ReplicatedStrategy):
    """Every device holds a copy of every variable; gradients are all-reduced at each step.

    Args:
        devices: names such as `"/gpu:0"`, `"GPU:1"`, `"cpu:0"`, or `jax.Device`s, in replica
            order. None takes all accelerators, or all CPU devices where there are none. CPU
            devices that do not exist are created when JAX has not started yet.
        cross_device_ops: how an all-reduce is done; XLA's own by default. `CompressedAllReduce` sends
            gradients in fewer bytes.
        num_gpus: how many devices to take, of the first ones.
        state_layout: `"mirrored"`, or `"sharded"`: each device holds and updates its part of the
            optimizer's variables, which then take 1/n of the memory with n replicas; or
            `"fully_sharded"`: of weights, too, which are made whole where a step uses them.
        sync: `LocalUpdates` lets each replica train by itself for some steps, between which nothing is sent.
            None averages the gradients of each step.
        devices_per_replica: of how many devices each replica consists, for models that do not fit on one. The
            first so many of `devices` are the first replica.
        layout_map: along which axes variables are cut over the devices of a replica: a
            `keras.distribution.LayoutMap` or a dict, from patterns of paths to tuples with `"model"` for the
            axis that is cut and None for others; or a function from a variable to such a tuple, or to None.
            By default, and with `"auto"`, the axes follow from the traced program of each model.

    Raises:
        InvalidArgumentError: for another `state_layout`, or one that does not go with `sync`.
        DeviceError: when a device is absent, repeated or cannot be read.

    >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    >>> strategy.num_replicas_in_sync
    2
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        num_gpus: int | None = None,
        state_layout: StateLayoutName = "mirrored",
        sync: Synchronization | None = None,
        devices_per_replica: int = 1,
        layout_map: LayoutMap | None = None,
    ) -> None:
        hint = "Write `unisono.RingAllReduce()`, for example."
        check_instance(cross_device_ops, "cross_device_ops", CrossDeviceOps, hint)
        super().__init__(mesh_of(resolve_devices(devices, num_gpus), devices_per_replica))
        strategy_of_process_made(type(self).__name__)
        own = own_ops(self._mesh.platform)
        self._ops = own if cross_device_ops is None else cross_device_ops._over(own)
        self._state_layout = layout_of(state_layout, self._ops, sync, self._mesh, self._group, layout_map)

    @property
    def _of_servers(self) -> Callable[[], Strategy]:
        """Makes the strategy of all devices of a remote cluster."""
        maker: Callable[[], Strategy] = load("strategy of several workers")
        return maker

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """The all-reduce given to the constructor."""
        return self._ops
