"""`TPUStrategy`: synchronous training on the cores of a TPU; the engine of `MirroredStrategy`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from unisono._checks import check_instance
from unisono._errors import InvalidArgumentError
from unisono._mesh import ReplicaMesh
from unisono.cluster_resolver._tpu import DeviceAssignment, TPUClusterResolver
from unisono.strategies._replicated import ReplicatedStrategy

T = TypeVar("T")


class TPUStrategy(ReplicatedStrategy):
    """Every TPU core holds a copy of every variable; XLA all-reduces gradients over the TPU's links.

    Args:
        tpu_cluster_resolver: which TPU; the local one by default.
        experimental_device_assignment: which of its cores are replicas; all by default.
        experimental_spmd_xla_partitioning: must be False: a replica is one core.

    Raises:
        BackendError: when there is no TPU.
        InvalidTypeError: for a resolver or an assignment of another type.
        InvalidArgumentError: for `experimental_spmd_xla_partitioning=True`.

    >>> from unisono.cluster_resolver import TPUClusterResolver
    >>> strategy = TPUStrategy(TPUClusterResolver(devices=["cpu:0", "cpu:1"]))
    >>> strategy.num_replicas_in_sync
    2
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
    ) -> None:
        hint, assigned = "Leave it out for all cores of this machine's TPU.", experimental_device_assignment
        check_instance(tpu_cluster_resolver, "tpu_cluster_resolver", TPUClusterResolver, hint)
        check_instance(assigned, "experimental_device_assignment", DeviceAssignment, hint)
        if experimental_spmd_xla_partitioning:
            raise InvalidArgumentError(
                "A replica must be one core: XLA does not partition its computation over several. Received: "
                "experimental_spmd_xla_partitioning=True. Leave it out."
            )
        self._resolver = tpu_cluster_resolver or TPUClusterResolver()
        super().__init__(ReplicaMesh(tuple(assigned.devices if assigned else self._resolver.devices)))
        # tf.distribute's TPU strategy has it set, and programs that pad their batches read it.
        self.extended.experimental_require_static_shapes = True

    @property
    def cluster_resolver(self) -> TPUClusterResolver:
        """The resolver given to the constructor."""
        return self._resolver

    def experimental_assign_to_logical_device(self, tensor: T, logical_device_id: int) -> T:
        """Return the tensor: a replica has one logical device, number 0.

        Args:
            tensor: any.
            logical_device_id: must be 0.

        Raises:
            InvalidArgumentError: for another device.
        """
        if logical_device_id != 0:
            raise _one_core(f"logical_device_id={logical_device_id}", "Write 0.")
        return tensor

    def experimental_split_to_logical_devices(self, tensor: T, partition_dimensions: Sequence[int]) -> T:
        """Return the tensor: a replica has one logical device.

        Args:
            tensor: any.
            partition_dimensions: into how many parts each dimension is split; all 1.

        Raises:
            InvalidArgumentError: for more parts than one, or another number of dimensions.
        """
        rank = len(getattr(tensor, "shape", ()))
        if len(partition_dimensions) != rank or any(parts != 1 for parts in partition_dimensions):
            raise _one_core(f"partition_dimensions={list(partition_dimensions)}", f"Write {[1] * rank}.")
        return tensor

    def experimental_replicate_to_logical_devices(self, tensor: T) -> T:
        """Return the tensor: it is on the replica's one logical device.

        Args:
            tensor: any.
        """
        return tensor


def _one_core(received: str, instead: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"A replica has one logical device, with the number 0. Received: {received}. {instead}"
    )
