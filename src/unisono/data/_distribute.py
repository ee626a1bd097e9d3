"""Any iterable of batches as an iterable of per-replica values on the devices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError, UnisonoError
from unisono._mesh import ReplicaMesh
from unisono._values import PerReplica
from unisono.data._sharding import InputOptions, split_points


class OutOfRangeError(UnisonoError, IndexError):
    """A distributed iterator has no next batch."""


def split_batch(batch: Any, mesh: ReplicaMesh) -> Any:
    """Return a batch with each array split over the replicas, on their devices.

    Args:
        batch: pytree of arrays with the same number of rows; scalars and strings are given to
            all replicas, None leaves pass.
        mesh: the replicas.

    Returns:
        The pytree with a `PerReplica` for each array: parts of equal size where the rows divide,
        and balanced parts where they do not. With one replica, arrays on its device.

    Raises:
        InvalidArgumentError: when arrays have different numbers of rows.
    """
    leaves, structure = jax.tree.flatten(batch)
    arrays = [_as_array(leaf) for leaf in leaves]
    rows = _common_rows(batch, arrays)
    return jax.tree.unflatten(structure, [_split(a, rows, mesh) for a in arrays])


def _as_array(leaf: Any) -> Any:
    """NumPy or JAX arrays as they are; tensors of other libraries through NumPy."""
    if isinstance(leaf, (np.ndarray, jax.Array)):
        return leaf
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu()
    if hasattr(leaf, "__array__"):
        return np.asarray(leaf)
    return leaf


def _common_rows(batch: Any, arrays: list[Any]) -> int:
    shapes = [np.shape(a) if hasattr(a, "shape") else () for a in arrays]
    rows = next((s[0] for s in shapes if s), 0)
    for (path, _), shape in zip(jax.tree_util.tree_leaves_with_path(batch), shapes, strict=True):
        if shape and shape[0] != rows:
            raise InvalidArgumentError(
                "All arrays of a batch must have the same number of rows. Received: shape "
                f"{shape} at batch{jax.tree_util.keystr(path)}, where others have {rows} rows. "
                "Give every array one row for each example."
            )
    return int(rows)


def _split(array: Any, rows: int, mesh: ReplicaMesh) -> Any:
    if not hasattr(array, "shape") or array.ndim == 0:
        return array
    replicas = mesh.num_replicas
    if replicas == 1:
        return jax.device_put(_owned(array), mesh.devices[0])
    if rows % replicas == 0 and rows:
        parts = array.reshape(replicas, rows // replicas, *array.shape[1:])
        return PerReplica.from_stacked(mesh.put(_owned(parts), mesh.sharded))
    parts = [array[a:b] for a, b in split_points(rows, replicas)]
    if mesh.is_spread:
        # Replicas of unequal size are traced in turn, and every device computes all of them.
        return PerReplica(_owned(p) for p in parts)
    return PerReplica(jax.device_put(_owned(p), d) for p, d in zip(parts, mesh.devices, strict=True))


def _owned(array: Any) -> Any:
    """A copy that nobody writes to: JAX may read an aligned NumPy buffer in place, and later."""
    return np.array(array) if isinstance(array, np.ndarray) else array


def per_replica_elements(iterator: Iterator[Any], mesh: ReplicaMesh) -> Iterator[Any]:
    """Give successive elements of `iterator` to successive replicas.

    At the end, replicas without an element get arrays of no rows.

    Args:
        iterator: of one replica's batches.
        mesh: the replicas.
    """
    for first in iterator:
        row = [first]
        for _ in range(mesh.num_replicas - 1):
            element = next(iterator, _END)
            row.append(jax.tree.map(_without_rows, first) if element is _END else element)
        if mesh.num_replicas == 1:
            yield jax.tree.map(lambda x: jax.device_put(_owned(_as_array(x)), mesh.devices[0]), first)
        else:
            yield jax.tree.map(lambda *leaves: _joined(leaves, mesh), *row)


def from_function(
    options: InputOptions,
    check_iterable_here: Callable[[], None],
    elements: Callable[[Iterator[Any], ReplicaMesh], Iterator[Any]] = per_replica_elements,
) -> Callable[..., Any]:
    """Return what makes an iterator over all replicas from one over the batches of single ones.

    Args:
        options: how many rounds of batches are put ahead.
        check_iterable_here: raises where iteration is not allowed.
        elements: gives successive batches to the replicas.
    """

    def join(iterator: Iterator[Any], mesh: ReplicaMesh) -> DistributedIterator:
        return DistributedIterator(
            elements(iterator, mesh), lambda placed: placed, options, check_iterable_here
        )

    return join


_END = object()


def _without_rows(leaf: Any) -> Any:
    array = np.asarray(_as_array(leaf))
    if array.ndim == 0:
        raise InvalidArgumentError(
            "The elements of an input without rows must divide over the replicas. Received: a last "
            "group with fewer scalars than replicas. Use `.batch(1)`, or drop the rest."
        )
    return array[:0]


def _joined(leaves: tuple[Any, ...], mesh: ReplicaMesh) -> Any:
    arrays = [_as_array(leaf) for leaf in leaves]
    if not hasattr(arrays[0], "shape"):
        return PerReplica(arrays)
    if len({a.shape for a in arrays}) == 1:
        return PerReplica.from_stacked(
            jax.device_put(np.stack([np.asarray(a) for a in arrays]), mesh.sharded)
        )
    return PerReplica(jax.device_put(_owned(a), d) for a, d in zip(arrays, mesh.devices, strict=True))


class DistributedDataset:
    """An iterable of batches, each split over the replicas.

    Args:
        dataset: a list of batches, a generator, a function that returns an iterator, a
            `keras.utils.PyDataset`, a torch DataLoader, a `tf.data.Dataset` or a Grain dataset.
        mesh: the replicas.
        options: how far batches are put ahead.
        check_iterable_here: raises where iteration is not allowed.

    Raises:
        InvalidTypeError: when `dataset` is arrays that are not batched, or no iterable.
    """

    def __init__(
        self,
        dataset: Any,
        mesh: ReplicaMesh,
        options: InputOptions | None = None,
        check_iterable_here: Callable[[], None] = lambda: None,
    ) -> None:
        _check_batched(dataset)
        self._dataset, self._mesh = dataset, mesh
        self._options = options or InputOptions()
        self._check = check_iterable_here
        self._is_used = False

    def __iter__(self) -> DistributedIterator:
        self._check()
        if isinstance(self._dataset, Iterator):
            if self._is_used:
                raise InvalidArgumentError(
                    "A generator gives its batches once. Received: a second iteration over the same "
                    f"{type(self._dataset).__name__}. Pass a function that makes a new one: "
                    "`distribute_dataset(lambda: generator())`."
                )
            self._is_used = True
        mesh = self._mesh
        return DistributedIterator(
            _batches(self._dataset), lambda batch: split_batch(batch, mesh), self._options, self._check
        )

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def cardinality(self) -> int | None:
        """The number of batches, or None where the source does not know."""
        try:
            return len(self._dataset)
        except TypeError:
            return None

    @property
    def element_spec(self) -> Any:
        """The shapes and types of a batch: what the source says, or `jax.ShapeDtypeStruct` of the first.

        Raises:
            InvalidArgumentError: for a generator, whose first batch would be lost.
        """
        if hasattr(self._dataset, "element_spec"):
            return self._dataset.element_spec
        if isinstance(self._dataset, Iterator):
            raise InvalidArgumentError(
                "The specification of a generator is not known before it is read. Received: "
                f"{type(self._dataset).__name__}. Pass a list or a dataset."
            )
        first = next(iter(_batches(self._dataset)))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), first)


class DistributedIterator:
    """One pass over a distributed dataset; the next batches are put onto the devices ahead.

    The look-ahead cannot be seen, but in the source: an error is raised where its batch would
    have been, nothing is read after the end or after an error that nobody has seen, and the state
    is that of the last batch given.

    Args:
        batches: host batches.
        place: from a host batch to a batch on the devices.
        options: how many batches are put ahead.
        check_iterable_here: raises where iteration is not allowed.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        place: Callable[[Any], Any],
        options: InputOptions,
        check_iterable_here: Callable[[], None],
    ) -> None:
        self._batches, self._place, self._check = batches, place, check_iterable_here
        fetch = options.experimental_fetch_to_device
        self._ahead = options.experimental_per_replica_buffer_size if fetch else 0
        self._source_state = getattr(batches, "get_state", None)
        #: Batches on the devices, each with the state of the source after it.
        self._ready: deque[tuple[Any, Any]] = deque()
        self._error: Exception | None = None
        self._is_ended = False
        self._state: Any = None

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        self._check()
        if self._source_state is not None and self._state is None:
            self._state = self._source_state()
        while len(self._ready) <= self._ahead and not self._is_ended and self._error is None:
            self._read()
        if self._ready:
            batch, self._state = self._ready.popleft()
            return batch
        error, self._error = self._error, None
        if error is None:
            raise StopIteration
        try:
            raise error
        finally:
            # An error holds this frame: without the name there is no circle.
            del error

    def _read(self) -> None:
        try:
            batch = next(self._batches, _END)
            if batch is _END:
                self._is_ended = True
                return
            state = None if self._source_state is None else self._source_state()
            self._ready.append((self._place(batch), state))
        except Exception as error:
            # The batches before it come first.
            self._error = error

    def close(self) -> None:
        """End the pass: drop what was put ahead, and close the source where it can be closed."""
        self._is_ended = True
        self._ready.clear()
        self._error = None
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()

    def get_state(self) -> Any:
        """Return where the source stood after the last batch that was given.

        Raises:
            InvalidArgumentError: when the source has no state.
        """
        if self._source_state is None:
            raise _no_state(self._batches)
        return self._source_state() if self._state is None else self._state

    def set_state(self, state: Any) -> None:
        """Go on from a state.

        Args:
            state: from `get_state`, of an iterator over the same source.

        Raises:
            InvalidArgumentError: when the source has no state.
        """
        if self._source_state is None:
            raise _no_state(self._batches)
        self._batches.set_state(state)  # type: ignore[attr-defined]
        self._ready.clear()
        self._error, self._is_ended, self._state = None, False, None

    def get_next(self) -> Any:
        """Return the next batch.

        Raises:
            OutOfRangeError: at the end.
        """
        batch = next(self, _END)
        if batch is _END:
            raise OutOfRangeError("The input has no further batch. Iterate over the dataset again.")
        return batch

    def get_next_as_optional(self) -> OptionalBatch:
        """Return the next batch, if there is one."""
        batch = next(self, _END)
        return OptionalBatch(None if batch is _END else (batch,))


def _no_state(batches: Any) -> InvalidArgumentError:
    return InvalidArgumentError(
        "The place in an input is known where its source has `get_state` and `set_state`. Received: "
        f"{type(batches).__name__}. Distribute a `unisono.data.Dataset`."
    )


class OptionalBatch:
    """A batch, or nothing.

    Args:
        held: a tuple of the batch, or None.
    """

    def __init__(self, held: tuple[Any] | None) -> None:
        self._held = held

    def has_value(self) -> bool:
        """Return whether there is a batch."""
        return self._held is not None

    def get_value(self) -> Any:
        """Return the batch.

        Raises:
            OutOfRangeError: when there is none.
        """
        if self._held is None:
            raise OutOfRangeError("There is no batch. Ask `has_value()` first.")
        return self._held[0]


def _check_batched(dataset: Any) -> None:
    is_arrays = isinstance(dataset, tuple) and all(hasattr(x, "shape") for x in dataset)
    if isinstance(dataset, dict) or hasattr(dataset, "shape") or is_arrays:
        raise InvalidTypeError(
            "`distribute_dataset` needs an iterable of batches. Received: arrays. Batch them first, "
            "for example `[(x[i:i+64], y[i:i+64]) for i in range(0, len(x), 64)]`."
        )
    if not (callable(dataset) or hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")):
        raise InvalidTypeError(
            f"`distribute_dataset` needs an iterable of batches. Received: {type(dataset).__name__}. "
            "Pass a list of batches, a generator, or a dataset."
        )


def _batches(dataset: Any) -> Iterator[Any]:
    """The host batches of any source."""
    if hasattr(dataset, "as_numpy_iterator"):
        return iter(dataset.as_numpy_iterator())
    if hasattr(dataset, "num_batches") and hasattr(dataset, "__getitem__"):
        return _py_dataset(dataset)
    if callable(dataset) and not hasattr(dataset, "__iter__"):
        return iter(dataset())
    return iter(dataset)


def _py_dataset(dataset: Any) -> Iterator[Any]:
    """The batches of a `keras.utils.PyDataset`, and the call that it expects at the end."""
    for i in range(dataset.num_batches):
        yield dataset[i]
    dataset.on_epoch_end()
