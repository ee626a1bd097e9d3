"""The arrays of one call of `fit`, `evaluate` or `predict`, from its first step to its end.

Tests: tests/virtual/training/test_resident.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeAlias

import jax
import numpy as np

from unisono._mesh import ReplicaMesh
from unisono._system._blocks import set_for_block
from unisono._types import PyTree
from unisono.step._keras_internals import array_batches, arrays_of, is_validation
from unisono.training.resident._arrays import ResidentArrays, RowBatches, usable

#: From Keras' iterator of an epoch to its batches; None where they are placed one by one.
BatchesOf: TypeAlias = Callable[[Any], Iterator[PyTree] | None]


class DataOfCall:
    """The arrays that the loops of a call read: for training and, in `fit`, for the validation."""

    def __init__(self, mesh: ReplicaMesh) -> None:
        self._mesh = mesh
        #: By `id` of Keras' adapter of the data, which stays alive: the arrays, None for batches one by one.
        self._known: dict[int, tuple[object, ResidentArrays | None]] = {}

    def batches_of(self, iterator: Any) -> Iterator[PyTree] | None:
        """Return the batches of an epoch; None where they are placed one by one."""
        adapter = iterator.data_adapter
        if id(adapter) not in self._known:
            self._known[id(adapter)] = adapter, self._arrays(iterator)
        arrays = self._known[id(adapter)][1]
        if arrays is None:
            return None
        rows = len(jax.tree.leaves(arrays.host)[0])
        # Keras shuffles and cuts the numbers of the rows as it would the rows.
        return RowBatches(array_batches(iterator, (np.arange(rows, dtype=np.int32),)), arrays)

    def _arrays(self, iterator: Any) -> ResidentArrays | None:
        """Return the arrays of a loop as Keras would cut them; None where batches are placed one by one."""
        given = arrays_of(iterator)
        leaves = jax.tree.leaves(given)
        is_dense = bool(leaves) and all(isinstance(x, (np.ndarray, jax.Array)) for x in leaves)
        # Several processes place the parts of their own replicas.
        is_dense &= self._mesh.local_devices == self._mesh.devices
        # Of less than an epoch, or of one batch, there is nothing that is sent again.
        if not is_dense or iterator.steps_per_epoch or iterator.num_batches < 2:
            return None
        whole = next(array_batches(iterator, given, whole=True))
        arrays = ResidentArrays(whole, self._mesh)
        return arrays if usable(whole) and arrays.fits else None

    def release(self) -> None:
        """Free the memory of the devices: Keras' loop may be kept by a traceback."""
        for _, arrays in self._known.values():
            if arrays is not None:
                arrays.release()
        self._known.clear()


@contextlib.contextmanager
def data_of_call(
    mesh: ReplicaMesh, arguments: Mapping[str, object], variable: ContextVar[BatchesOf]
) -> Iterator[None]:
    """Let the arrays of a call lie on the devices, each from the first step that reads it.

    Args:
        arguments: of the call.
        variable: what Keras' loops ask for their batches.
    """
    if is_validation(arguments):
        # Its data are of the `fit` around it, which keeps them.
        yield
        return
    data = DataOfCall(mesh)
    with set_for_block(variable, data.batches_of):
        try:
            yield
        finally:
            data.release()
