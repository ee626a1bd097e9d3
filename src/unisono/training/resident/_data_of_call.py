"""The arrays of one call of `fit`, `evaluate` or `predict`, from its first step to its end.

Tests: tests/virtual/training/test_resident.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np

from unisono._mesh import ReplicaMesh
from unisono._system._blocks import set_for_block
from unisono._types import PyTree
from unisono.collectives._process_group import ProcessGroup
from unisono.step._keras_internals import array_batches, arrays_of, is_validation, standard_batch
from unisono.training.resident._arrays import ResidentArrays, RowBatches, usable

if TYPE_CHECKING:
    from unisono.data._row_numbers import RowPipeline
    from unisono.step._replicas import Replicas

#: From Keras' iterator of an epoch to its batches; None where they are placed one by one.
BatchesOf: TypeAlias = Callable[[Any], Iterator[PyTree] | None]

#: The share of a pipeline's arrays that an epoch must read. Less, as after a `shuffle` and a `take`, would
#: place more bytes than it sends.
_LEAST_SHARE = 0.5


@runtime_checkable
class RowReader(Protocol):
    """Data of Keras' loop that may choose rows of arrays; `data._keras_input` has it, which loads Grain."""

    def row_pipeline(self) -> RowPipeline | None:
        """Return the arrays whose rows the pipeline chooses; None for another pipeline."""

    def row_numbers(self, rows: RowPipeline) -> Iterator[np.ndarray]:
        """Return the numbers of the rows of each batch of the next iteration."""


#: Arrays on the host, and what gives for an epoch a tuple with the numbers of the rows of each batch.
_Rows: TypeAlias = tuple[PyTree, Callable[[], Iterator[tuple[np.ndarray]]]]


class _KeptData(NamedTuple):
    """Data of a loop that may lie on the devices; `numbers` as in `_Rows`."""

    arrays: ResidentArrays
    numbers: Callable[[], Iterator[tuple[np.ndarray]]]


class DataOfCall:
    """The arrays that the loops of a call read: for training and, in `fit`, for the validation."""

    def __init__(self, mesh: ReplicaMesh, processes: ProcessGroup) -> None:
        self._mesh, self._processes = mesh, processes
        #: By `id` of Keras' adapter of the data, which stays alive: None for batches one by one.
        self._known: dict[int, tuple[object, _KeptData | None]] = {}

    def batches_of(self, iterator: Any) -> Iterator[PyTree] | None:
        """Return the batches of an epoch; None where they are placed one by one."""
        adapter = iterator.data_adapter
        if id(adapter) not in self._known:
            self._known[id(adapter)] = adapter, self._agreed(self._kept(iterator))
        kept = self._known[id(adapter)][1]
        return None if kept is None else RowBatches(kept.numbers(), kept.arrays)

    def _kept(self, iterator: Any) -> _KeptData | None:
        """Return the data of a loop, if it reads rows of arrays which the devices can hold."""
        given = getattr(iterator.data_adapter, "py_dataset", None)
        rows = _of_pipeline(iterator, given) if isinstance(given, RowReader) else _of_arrays(iterator)
        if rows is None:
            return None
        host, numbers = rows
        arrays = ResidentArrays(host, self._mesh)
        return _KeptData(arrays, numbers) if usable(host) and arrays.fits else None

    def _agreed(self, kept: _KeptData | None) -> _KeptData | None:
        """Return data that all processes have placed on their devices; with one process, as they are.

        All run the same programs, so that one without room decides for the others.
        """
        if self._processes.size == 1:
            return kept
        is_placed = kept is not None and kept.arrays.place()
        if all(answer == b"1" for answer in self._processes.gather(b"%d" % is_placed)):
            return kept
        if kept is not None:
            kept.arrays.release()
        return None

    def release(self) -> None:
        """Free the memory of the devices: Keras' loop may be kept by a traceback."""
        for _, kept in self._known.values():
            if kept is not None:
                kept.arrays.release()
        self._known.clear()


def _of_arrays(iterator: Any) -> _Rows | None:
    """Return arrays as Keras would cut them; None for other data, and where nothing is sent again."""
    given = arrays_of(iterator)
    leaves = jax.tree.leaves(given)
    is_dense = bool(leaves) and all(isinstance(x, (np.ndarray, jax.Array)) for x in leaves)
    # Of less than an epoch, or of one batch, there is nothing that is sent again.
    if not is_dense or iterator.steps_per_epoch or iterator.num_batches < 2:
        return None
    whole = next(array_batches(iterator, given, whole=True))
    numbers = np.arange(len(jax.tree.leaves(whole)[0]), dtype=np.int32)
    # Keras shuffles and cuts the numbers of the rows as it would the rows.
    return whole, lambda: array_batches(iterator, (numbers,))


def _of_pipeline(iterator: Any, data: RowReader) -> _Rows | None:
    """Return the arrays whose rows a pipeline chooses; None for another, and where it reads few of them."""
    rows = data.row_pipeline()
    if rows is None:
        return None
    batches = iterator.steps_per_epoch or iterator.num_batches
    count = len(jax.tree.leaves(rows.arrays)[0])
    if batches < 2 or batches * rows.batch_size < count * _LEAST_SHARE:
        return None
    # Class weights become weights of all rows.
    return standard_batch(iterator, rows.arrays), lambda: ((x,) for x in data.row_numbers(rows))


@contextlib.contextmanager
def data_of_call(
    replicas: Replicas, arguments: Mapping[str, object], variable: ContextVar[BatchesOf]
) -> Iterator[None]:
    """Let the arrays of a call lie on the devices, each from the first step that reads it.

    Args:
        replicas: of the model's strategy.
        arguments: of the call.
        variable: what Keras' loops ask for their batches.
    """
    if is_validation(arguments):
        # Its data are of the `fit` around it, which keeps them.
        yield
        return
    data = DataOfCall(replicas.mesh, replicas.process_group)
    with set_for_block(variable, data.batches_of):
        try:
            yield
        finally:
            data.release()
