"""Tensors of a replica's computation that lie in parts on its devices, or whole on each.

XLA divides the computation from such a tensor on, forward and backward: of a convolution over parts of an
image each device computes its part, and exchanges the lines at the borders with its neighbours.

Source: Xu et al., "GSPMD", 2021 (https://arxiv.org/abs/2105.04663), section 3.5.

Tests: tests/virtual/strategies/test_logical_devices.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from unisono.model_parallel._replica_grid import MODEL_AXIS, ReplicaGrid

T = TypeVar("T")


def lying_on_devices(mesh: ReplicaGrid, tensor: T, parts: Sequence[int]) -> T:
    """Return a tensor of a replica's computation that lies so on the devices of the replica.

    Args:
        mesh: the devices of all replicas.
        tensor: what is no array of a trace is returned as it is.
        parts: into how many equal parts each dimension is split; all 1 for a tensor whole on each device.
    """
    if not isinstance(tensor, jax.core.Tracer) or not all(isinstance(n, int) for n in tensor.shape):
        # Outside of a step; or Keras finds out the shapes of a model, and a batch has no size yet.
        return tensor
    is_in_replica = not jax.sharding.get_abstract_mesh().empty
    if not is_in_replica and mesh.num_replicas > 1:
        # A program of all replicas: whole on each device, a tensor would be gathered from the other
        # replicas, too. And of parts along some axes of a mesh XLA makes wrong gradients: that for a kernel
        # is multiplied by the size of the other axes (jaxlib 0.10.2, with Shardy and with GSPMD).
        return tensor

    def pinned(array: jax.Array, spec: PartitionSpec) -> jax.Array:
        lies = spec if is_in_replica else NamedSharding(mesh.mesh, spec)
        constrained: jax.Array = jax.lax.with_sharding_constraint(array, lies)
        return constrained

    lying: Any = _split(tensor, parts, pinned)
    return lying  # type: ignore[no-any-return]


def _split(tensor: jax.Array, parts: Sequence[int], pinned: Callable[..., jax.Array]) -> jax.Array:
    """Return a tensor in parts along one dimension or several; whole where there is nothing to split.

    Args:
        pinned: pins an array where a spec says.
    """
    split = [i for i, n in enumerate(parts) if n > 1]
    if len(split) < 2:
        return pinned(
            tensor, PartitionSpec(*[MODEL_AXIS if i in split else None for i in range(tensor.ndim)])
        )
    # The mesh has one axis for a replica's devices. All parts along one axis are split over it, and XLA
    # follows this axis through the reshape to the dimensions that it is made of. Nothing moves.
    rank, pairs = len(parts), zip(tensor.shape, parts, strict=True)
    blocks = tensor.reshape([n for size, count in pairs for n in (count, size // count)])
    blocks = blocks.transpose([*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)])
    blocks = pinned(blocks.reshape(math.prod(parts), *blocks.shape[rank:]), PartitionSpec(MODEL_AXIS))
    blocks = blocks.reshape(*parts, *blocks.shape[1:])
    return blocks.transpose([i for k in range(rank) for i in (k, k + rank)]).reshape(tensor.shape)
