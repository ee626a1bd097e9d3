"""Host batches onto the devices, fast where the devices are the host's own cores."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np

from unisono._mesh import ReplicaMesh
from unisono.step._compiler import RUN_AHEAD

#: XLA takes a NumPy buffer over without a copy when it is aligned to this many bytes.
_ALIGNMENT = 64

#: Larger arrays are copied by JAX; keeping buffers for every step in flight would cost too much.
_LARGEST = 4 << 20

#: One buffer for every step that may be in flight, the one being filled, and one to spare.
_SLOTS = RUN_AHEAD + 2


class BatchPlacer:
    """Puts batches onto the devices of a sharding.

    On CPU devices each array is copied into one of a ring of aligned buffers, which XLA reads in
    place: a third of the time of `jax.device_put`, and a generator that writes into its last
    batch cannot harm a step in flight. A buffer is written again only after `RUN_AHEAD` later
    steps were started, so after its own step is done.

    Where devices of several processes compute, every process holds the global batch and places
    its own devices' part.

    Args:
        mesh: the devices.
        sharding: how the arrays lie on them.
    """

    def __init__(self, mesh: ReplicaMesh, sharding: jax.sharding.NamedSharding) -> None:
        self._mesh = mesh
        self._sharding = sharding
        self._is_cpu = mesh.platform == "cpu"
        self._rings: dict[Any, itertools.cycle[np.ndarray]] = {}

    def __call__(self, batch: Any) -> Any:
        """Return `batch` on the devices; None leaves pass.

        Args:
            batch: pytree of arrays.
        """
        if not self._is_cpu:
            return self._mesh.put(batch, self._sharding)
        if self._sharding.num_devices == 1:
            return batch  # `jax.jit` takes NumPy arrays itself, and to one device it does so fastest
        leaves, structure = jax.tree.flatten(batch)
        return jax.tree.unflatten(structure, [self._place(i, x) for i, x in enumerate(leaves)])

    def _place(self, position: int, array: Any) -> Any:
        if isinstance(array, jax.Array) or not 0 < array.nbytes <= _LARGEST:
            return self._mesh.put(array, self._sharding)
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        key = (position, array.shape, dtype)
        if key not in self._rings:
            buffers = [_aligned(array.shape, dtype) for _ in range(_SLOTS)]
            self._rings[key] = itertools.cycle(buffers)
        buffer = next(self._rings[key])
        np.copyto(buffer, array, casting="unsafe")
        return jax.make_array_from_callback(array.shape, self._sharding, lambda index: buffer[index])


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialized array whose memory begins at a multiple of `_ALIGNMENT` bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    aligned: np.ndarray = raw[start : start + size].view(dtype).reshape(shape)
    return aligned
