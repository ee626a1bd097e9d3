"""`TPUStrategy`: synchronous training on the cores of a TPU; the engine of `MirroredStrategy`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import keras

from unisono._checks import check_instance
from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._features import load
from unisono.cluster_resolver._tpu import DeviceAssignment, TPUClusterResolver
from unisono.strategies._replicated import LAYOUTS, ReplicatedStrategy, layout_of, mesh_of

if TYPE_CHECKING:
    from unisono.model_parallel._layout_rules import LayoutMap

T = TypeVar("T")


class TPUStrategy(ReplicatedStrategy):
    """A replica on each TPU core, or on several; XLA all-reduces gradients over the TPU's links.

    Where a device assignment gives a replica several cores, these are its logical devices: they share its
    variables and its computation, as with `devices_per_replica` of `MirroredStrategy`.

    Args:
        tpu_cluster_resolver: which TPU; the local one by default.
        experimental_device_assignment: which of its cores are replicas; each of all by default.
        experimental_spmd_xla_partitioning: whether XLA divides a replica's computation over its logical
            devices, which it always does. With True, as in TensorFlow, no tensor can be assigned to one.
        layout_map: along which axes variables are cut over a replica's cores, as in `MirroredStrategy`.

    Raises:
        BackendError: when there is no TPU.
        InvalidTypeError: for a resolver, an assignment or a map of another type.
        InvalidArgumentError: for a map with replicas of one core.

    >>> from unisono.cluster_resolver import TPUClusterResolver
    >>> from unisono.tpu.experimental import DeviceAssignment, initialize_tpu_system
    >>> resolver = TPUClusterResolver(devices=["cpu:0", "cpu:1", "cpu:2", "cpu:3"])
    >>> TPUStrategy(resolver).num_replicas_in_sync
    4
    >>> topology = initialize_tpu_system(resolver)
    >>> pairs = DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2], num_replicas=2)
    >>> TPUStrategy(resolver, experimental_device_assignment=pairs).num_replicas_in_sync
    2
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        layout_map: LayoutMap | None = None,
    ) -> None:
        hint, assigned = "Leave it out for all cores of this machine's TPU.", experimental_device_assignment
        check_instance(tpu_cluster_resolver, "tpu_cluster_resolver", TPUClusterResolver, hint)
        check_instance(assigned, "experimental_device_assignment", DeviceAssignment, hint)
        self._resolver = tpu_cluster_resolver or TPUClusterResolver()
        self._is_spmd = experimental_spmd_xla_partitioning
        devices = tuple(assigned.devices if assigned else self._resolver.devices)
        super().__init__(mesh_of(devices, assigned.num_cores_per_replica if assigned else 1))
        ops = self.cross_device_ops
        self._state_layout = layout_of(LAYOUTS[0], ops, None, self._mesh, self._group, layout_map)
        # tf.distribute's TPU strategy has it set, and programs that pad their batches read it.
        self.extended.experimental_require_static_shapes = True

    @property
    def cluster_resolver(self) -> TPUClusterResolver:
        """The resolver given to the constructor."""
        return self._resolver

    def experimental_assign_to_logical_device(self, tensor: T, logical_device_id: int) -> T:
        """Return the tensor, computed on a logical device of the replica.

        XLA runs one program on all logical devices of a replica. Each computes the tensor as a whole, so the
        named device does; the others do the same, instead of waiting for it.

        Args:
            tensor: of a step of `run`, or of a layer's `call`.
            logical_device_id: from 0 to the number of logical devices less 1.

        Raises:
            InvalidArgumentError: for another device, or with `experimental_spmd_xla_partitioning=True`.
            InvalidTypeError: for a symbolic tensor of Keras.
        """
        count = self._mesh.devices_per_replica
        if self._is_spmd:
            raise InvalidArgumentError(
                "A tensor cannot be assigned to a logical device in SPMD mode. Received: logical_device_id="
                f"{logical_device_id} and experimental_spmd_xla_partitioning=True. Leave the latter out, or "
                "call `experimental_replicate_to_logical_devices`."
            )
        if not 0 <= logical_device_id < count:
            raise InvalidArgumentError(
                "`logical_device_id` must be lower than the number of logical devices of a replica, "
                f"{count}. Received: logical_device_id={logical_device_id}. Write one from 0 to {count - 1}."
            )
        return self.experimental_replicate_to_logical_devices(tensor)

    def experimental_split_to_logical_devices(self, tensor: T, partition_dimensions: Sequence[int]) -> T:
        """Return the tensor in equal parts, one on each logical device of the replica.

        What is computed from it is divided in the same way, as far as XLA can: of a convolution over parts of
        an image each device computes its part. The values do not change.

        Args:
            tensor: of a step of `run`, or of a layer's `call`.
            partition_dimensions: into how many parts each dimension is split. Their product is the number of
                logical devices.

        Raises:
            InvalidArgumentError: for another number of dimensions, another product, or a dimension that does
                not divide.
            InvalidTypeError: for a symbolic tensor of Keras.
        """
        shape, parts = tuple(getattr(tensor, "shape", ())), [int(n) for n in partition_dimensions]
        received = f"Received: partition_dimensions={parts} for a tensor of shape {shape}."
        if len(parts) != len(shape):
            raise InvalidArgumentError(
                f"The length of `partition_dimensions` must be the rank of the tensor, {len(shape)}. "
                f"{received} Write a number for each dimension, 1 for an unsplit one."
            )
        count = self._mesh.devices_per_replica
        if any(n < 1 for n in parts) or math.prod(parts) != count:
            raise InvalidArgumentError(
                "The product of `partition_dimensions` must be the number of logical devices of a replica, "
                f"{count}. {received} Write {[count, *[1] * (len(shape) - 1)][: len(shape)]}, for example, "
                "or another `computation_shape` of the device assignment."
            )
        for number, (size, n) in enumerate(zip(shape, parts, strict=True)):
            if isinstance(size, int) and size % n:
                raise InvalidArgumentError(
                    f"The shape of the tensor at `partition_dimensions[{number}]` must be divisible by its "
                    f"value. {received} Pad the tensor, or split another dimension."
                )
        return self._lying(tensor, parts)

    def experimental_replicate_to_logical_devices(self, tensor: T) -> T:
        """Return the tensor whole on each logical device of the replica, as for a loss.

        Args:
            tensor: of a step of `run`, or of a layer's `call`.

        Raises:
            InvalidTypeError: for a symbolic tensor of Keras.
        """
        return self._lying(tensor, [1] * len(getattr(tensor, "shape", ())))

    def _lying(self, tensor: T, parts: Sequence[int]) -> T:
        if isinstance(tensor, keras.KerasTensor):
            raise InvalidTypeError(
                "A tensor must be part of a replica's computation. Received: a symbolic tensor of Keras, "
                f"{tensor}. Call the method in the `call` of a layer, or in a `keras.layers.Lambda`."
            )
        if self._mesh.devices_per_replica == 1:
            return tensor
        lying: T = load("tensors on a replica's devices")(self._mesh, tensor, parts)
        return lying
