"""`TPUStrategy`: synchronous training on the cores of a TPU; the engine of `MirroredStrategy`."""

from __future__ import annotations

from typing import Any

from unisono._mesh import ReplicaMesh
from unisono.cluster._tpu import TPUClusterResolver
from unisono.collectives._cross_device import CrossDeviceOps
from unisono.strategies._base import Strategy


class TPUStrategy(Strategy):
    """Every TPU core holds a copy of every variable; XLA all-reduces gradients over the TPU's links.

    Args:
        tpu_cluster_resolver: which TPU; the local one by default.

    Raises:
        BackendError: when there is no TPU.
    """

    def __init__(self, tpu_cluster_resolver: TPUClusterResolver | None = None) -> None:
        self._resolver = tpu_cluster_resolver or TPUClusterResolver()
        super().__init__(ReplicaMesh(tuple(self._resolver.devices)))
        self._ops = CrossDeviceOps()
        self.extended.experimental_require_static_shapes = True

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """XLA's own all-reduce."""
        return self._ops

    @property
    def cluster_resolver(self) -> Any:
        """The resolver given to the constructor."""
        return self._resolver
