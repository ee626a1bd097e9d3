"""Updates of small weights in few kernels, on GPUs.

An optimizer updates each weight by itself, and XLA makes each update a kernel. It computes several in one
kernel where their results have equally many elements and they read the same array, which is not true of
updates as they are. So gradients of equal sizes are copied into one array first, of which each update reads a
part. A transformer of three layers has 51 weights, whose updates by Adam are 12 kernels then instead of 51
(counted in XLA's program for an H200, jaxlib 0.10.2, 2026-11-29). Gradients stay what they are, to the bit.

Tests: tests/virtual/training/test_kernels.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from unisono._context import ReplicaContext
from unisono.training.replica._rows import StandInEngine

#: The most elements of a gradient that is copied: to update more takes longer than to start a kernel.
_SMALL = 65536
#: The most gradients in an array. XLA's kernels have up to 96 arguments and results; an update by Adam has 6.
_MOST = 32


def for_update(grads: list[jax.Array | None], replica: ReplicaContext) -> list[jax.Array | None]:
    """Return the gradients of all replicas as the update of a step should read them."""
    mesh = replica.strategy.mesh
    # Where XLA divides the program, each gradient may lie on the devices in a way of its own.
    is_divided = mesh.devices_per_replica > 1 or replica.num_replicas_in_sync < mesh.num_replicas
    # A step that is read is not compiled.
    return grads if is_divided or isinstance(replica._engine, StandInEngine) else side_by_side(grads)


def side_by_side(grads: Sequence[jax.Array | None]) -> list[jax.Array | None]:
    """Return the same gradients, which are parts of one array where they have equal sizes.

    Args:
        grads: one for each variable; None for one without.

    >>> x, y = side_by_side([jnp.ones(6), jnp.zeros((2, 3))])
    >>> x.shape, y.shape
    ((6,), (2, 3))
    """
    alike: defaultdict[tuple[Any, int], list[tuple[int, jax.Array]]] = defaultdict(list)
    for place, grad in enumerate(grads):
        if grad is not None and 0 < grad.size <= _SMALL:
            alike[grad.dtype, grad.size].append((place, grad))
    parts = list(grads)
    for all_alike in alike.values():
        for start in range(0, len(all_alike), _MOST):
            places, given = zip(*all_alike[start : start + _MOST], strict=True)
            if len(given) > 1:
                for place, grad in zip(places, _in_one_array(given), strict=True):
                    parts[place] = grad
    return parts


def _in_one_array(grads: Sequence[jax.Array]) -> list[jax.Array]:
    """Return gradients of equal sizes as parts of one array that is there at once."""
    # Without the barrier XLA would read the gradients themselves.
    every = jax.lax.optimization_barrier(jnp.stack([grad.reshape(-1) for grad in grads]))
    return [part.reshape(grad.shape) for part, grad in zip(every, grads, strict=True)]
