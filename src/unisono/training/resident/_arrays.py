"""Arrays on the devices, and batches that are the numbers of their rows.

Tests: tests/virtual/training/test_resident.py.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._mesh import ReplicaMesh
from unisono._types import PyTree
from unisono.data._batches import check_values
from unisono.training.groups._batch_placement import BatchStager, form_of
from unisono.training.groups._multi_step import Program
from unisono.training.resident._bound import bytes_here, rows_on_device
from unisono.training.resident._program import choosing_program

_LOG = logging.getLogger("unisono")


class ResidentArrays:
    """The arrays of a loop: on the host, and on all devices of a mesh once a step asks for them.

    Args:
        host: pytree of NumPy arrays with the same number of rows.
    """

    def __init__(self, host: PyTree, mesh: ReplicaMesh) -> None:
        self.host: PyTree = host
        self._leaves, self._structure = jax.tree.flatten(host)
        self._mesh = mesh
        #: The arrays on the devices; None before they are placed, and after the call.
        self.placed: PyTree = None
        self._can_be_placed = True

    def _different(self) -> dict[Hashable, np.ndarray]:
        return {_key(x): x for x in self._leaves}

    @property
    def fits(self) -> bool:
        """True if the arrays take so little of the devices' memory that they may stay there."""
        different = self._different().values()
        size = sum(x.size * jax.dtypes.canonicalize_dtype(x.dtype).itemsize for x in different)
        return bool(size <= bytes_here(self._mesh.local_devices))

    def place(self) -> bool:
        """Place the arrays, unless they are there; return whether they are."""
        if self.placed is None and self._can_be_placed:
            try:
                self.placed = self._on_devices()
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                self._can_be_placed = False
                _LOG.info("Arrays found no room on the devices; batches are placed one by one: %s", error)
        return self.placed is not None

    def _on_devices(self) -> PyTree:
        # An array that is given twice, as an autoencoder's, is placed once.
        once = {
            key: self._mesh.put(_filled(x), self._mesh.replicated) for key, x in self._different().items()
        }
        leaves = jax.block_until_ready([once[_key(x)] for x in self._leaves])
        return jax.tree.unflatten(self._structure, leaves)

    def release(self) -> None:
        """Free the memory of the devices."""
        self.placed, self._can_be_placed = None, False

    def batch(self, numbers: np.ndarray) -> PyTree:
        """Return the batch with these rows, as the loop of steps takes it."""
        choice = RowChoice(numbers, self)
        return jax.tree.unflatten(self._structure, [ChosenRows(x, choice) for x in self._leaves])


def _key(array: np.ndarray) -> Hashable:
    """Return a key that is the same for views of the same memory."""
    return array.ctypes.data, array.shape, array.strides, array.dtype


def _filled(array: np.ndarray) -> np.ndarray:
    """Return an array with room for more rows at its end, which no step reads."""
    rows = rows_on_device(len(array), array.nbytes)
    if rows == len(array):
        return array
    filled = np.zeros((rows, *array.shape[1:]), array.dtype)
    filled[: len(array)] = array
    return filled


class RowChoice(NamedTuple):
    """Which rows a batch has: their numbers, and the arrays that these count in."""

    numbers: np.ndarray
    arrays: ResidentArrays

    def with_arrays(self, numbers: PyTree) -> tuple[PyTree, PyTree]:
        """Return the data of a program: the arrays, and numbers that were placed."""
        return self.arrays.placed, numbers

    def stager(self, mesh: ReplicaMesh, batch: PyTree, slots: int) -> RowNumberStager:
        """Return a stager for such batches."""
        return RowNumberStager(mesh, batch, slots)

    def program(
        self, program: Program, spec: PyTree, slots: int, sharding: NamedSharding | None
    ) -> tuple[Program, PyTree]:
        """Return a program of such batches; see `choosing_program`."""
        return choosing_program(program, spec, slots, sharding)


class ChosenRows:
    """The rows of a batch in one array: their shape and type, and their values where the host reads them.

    Args:
        array: all rows, on the host.
        choice: of the batch.
    """

    __slots__ = ("_array", "choice", "dtype", "ndim", "shape")

    def __init__(self, array: np.ndarray, choice: RowChoice) -> None:
        self._array, self.choice = array, choice
        self.shape, self.ndim = (len(choice.numbers), *array.shape[1:]), array.ndim
        # As on the devices: the values are known to fit.
        self.dtype = jax.dtypes.canonicalize_dtype(array.dtype)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        rows: np.ndarray = self._array[self.choice.numbers]
        return rows if dtype is None else rows.astype(dtype)


class RowNumberStager(BatchStager):
    """Places the numbers of the rows of several batches as one array, split along its second dimension."""

    def __init__(self, mesh: ReplicaMesh, batch: PyTree, slots: int) -> None:
        super().__init__(mesh, _choice(batch).numbers, slots)
        self._form = form_of(batch)
        #: Of the running group. Stagers are kept longer than the arrays of a call may be.
        self._arrays = weakref.ref(_choice(batch).arrays)

    def fits(self, batch: PyTree) -> bool:
        """Return whether a batch has rows of the same arrays, and as many."""
        choice = getattr(jax.tree.leaves(batch)[0], "choice", None)
        return choice is not None and choice.arrays is self._arrays() and form_of(batch) == self._form

    def append(self, batch: PyTree) -> None:
        """Copy the numbers of a batch's rows behind the others, filled up where they do not divide."""
        choice = _choice(batch)
        if self.count == 0:
            self._arrays = weakref.ref(choice.arrays)
        super().append(choice.numbers)

    def place(self) -> tuple[jax.Array, PyTree]:
        """Return how many batches there are, and the arrays with the numbers on the devices."""
        count, numbers = super().place()
        arrays = self._arrays()
        return count, (None if arrays is None else arrays.placed, numbers)


def _choice(batch: PyTree) -> RowChoice:
    """Return the choice of a batch that has one."""
    return jax.tree.leaves(batch)[0].choice  # type: ignore[no-any-return]


class RowBatches:
    """The batches of an epoch, on the host; as rows of arrays on the devices for a function of `rows`.

    Args:
        numbers: gives a tuple with the numbers of the rows of each batch.
    """

    def __init__(self, numbers: Iterator[tuple[np.ndarray]], arrays: ResidentArrays) -> None:
        self._numbers, self._arrays = numbers, arrays
        self._chosen = (arrays.batch(rows) for (rows,) in numbers)

    def __iter__(self) -> Iterator[PyTree]:
        return self

    def __next__(self) -> PyTree:
        (rows,) = next(self._numbers)
        return jax.tree.map(lambda x: x[rows], self._arrays.host)

    @property
    def rows(self) -> Iterator[PyTree]:
        """The batches that follow, as rows of arrays on the devices; on the host if these have no room."""
        return self._chosen if self._arrays.place() else self


def usable(arrays: PyTree) -> bool:
    """Return whether devices can hold arrays, of which each batch would be checked otherwise."""
    leaves = jax.tree.leaves(arrays)
    if not leaves or not all(isinstance(x, np.ndarray) and x.ndim and type(x) is np.ndarray for x in leaves):
        return False
    try:
        check_values(arrays)
    except (InvalidArgumentError, InvalidTypeError):
        # Raised at the batch that has the value, after the steps before it.
        return False
    return True
