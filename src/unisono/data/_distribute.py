"""Any iterable of batches as an iterable of per-replica values on the devices."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import keras
import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from unisono._mesh import ReplicaMesh
from unisono._reads import DataSet, note_iteration
from unisono._types import ArrayLike, PyTree, UserValue
from unisono._values import PerReplica
from unisono.collectives._process_group import ProcessGroup
from unisono.data._batches import (
    ENDED,
    as_array,
    as_spec,
    check_batched,
    check_no_rows,
    check_values,
    common_rows,
    on_devices,
    owned,
    split_spec,
)
from unisono.data._dataset import Dataset
from unisono.data._iterator import DistributedIterator
from unisono.data._pipeline._cardinality import INFINITE, UNKNOWN
from unisono.data._pipeline._structure import TensorSpec
from unisono.data._sharding import InputContext, InputOptions, InputReplicationMode, split_points
from unisono.data._workers import elements_of_workers, joined_batches, on_sole_replica, shard_of_worker


def split_batch(batch: PyTree, mesh: ReplicaMesh) -> PyTree:
    """Return a batch with each array split over the replicas, on their devices.

    Args:
        batch: pytree of arrays with the same number of rows; scalars and strings are given to
            all replicas, None leaves pass.

    Returns:
        The pytree with a `PerReplica` for each array: parts of equal size where the rows divide,
        and balanced parts where they do not. With one replica, arrays on its device.

    Raises:
        InvalidArgumentError: when arrays have different numbers of rows, or integers too large for JAX.
        InvalidTypeError: when an array holds strings or objects.
    """
    leaves, structure = jax.tree.flatten(batch)
    arrays = [as_array(leaf) for leaf in leaves]
    check_values(jax.tree.unflatten(structure, arrays))
    rows = common_rows(batch, arrays)
    return jax.tree.unflatten(structure, [_split(a, rows, mesh) for a in arrays])


def _split(array: ArrayLike, rows: int, mesh: ReplicaMesh) -> ArrayLike | PerReplica:
    if not hasattr(array, "shape") or array.ndim == 0:
        return array
    replicas = mesh.num_replicas
    if replicas == 1:
        return on_sole_replica(array, mesh)
    if rows % replicas == 0 and rows:
        # One array of all parts: JAX places it in one call, and a step takes it as it is.
        parts = array.reshape(replicas, rows // replicas, *array.shape[1:])
        return PerReplica.from_stacked(mesh.put(owned(parts), mesh.sharded))
    return PerReplica(mesh.put_parts([owned(array[a:b]) for a, b in split_points(rows, replicas)]))


def per_replica_elements(iterator: Iterator[PyTree], mesh: ReplicaMesh) -> Iterator[PyTree]:
    """Yield per-replica values: successive elements of `iterator` go to successive replicas.

    Replicas without an element, at the end or where it is `ENDED`, get arrays of no rows.
    """
    for first in iterator:
        row = [first, *(next(iterator, ENDED) for _ in range(mesh.num_replicas - 1))]
        like = next(element for element in row if element is not ENDED)
        row = [jax.tree.map(_without_rows, like) if element is ENDED else element for element in row]
        row = [jax.tree.map(as_array, element) for element in row]
        for element in row:
            check_values(element)
        if mesh.num_replicas == 1:
            yield jax.tree.map(lambda x: on_sole_replica(x, mesh), row[0])
        else:
            yield jax.tree.map(lambda *leaves: _joined(leaves, mesh), *row)


def _without_rows(leaf: object) -> np.ndarray:
    array = np.asarray(as_array(leaf))
    if array.ndim == 0:
        raise InvalidArgumentError(
            "The elements of an input without rows must divide over the replicas. Received: a last "
            "group with fewer scalars than replicas. Use `.batch(1)`, or drop the rest."
        )
    return array[:0]


def _joined(leaves: tuple[ArrayLike, ...], mesh: ReplicaMesh) -> PerReplica:
    arrays = list(leaves)
    if not hasattr(arrays[0], "shape"):
        return PerReplica(arrays)
    if len({a.shape for a in arrays}) == 1:
        return PerReplica.from_stacked(
            jax.device_put(np.stack([np.asarray(a) for a in arrays]), mesh.sharded)
        )
    return PerReplica(jax.device_put(owned(a), mesh.place_of(i)) for i, a in enumerate(arrays))


class DistributedDataset(DataSet, abc.ABC):
    """Data whose elements hold one part for each replica; the strategy's `distribute_*` methods make it.

    Each `iter` is a new pass. The elements are structures of `PerReplica` (of arrays where there is one
    replica) for `strategy.run`; `fit`, `evaluate` and `predict` take the dataset itself.

    Args:
        mesh: the replicas.
        options: how far batches are put ahead.
        check_iterable_here: raises where iteration is not allowed.

    >>> import unisono
    >>> batches = [np.zeros((4, 2), "float32")]
    >>> data = unisono.MirroredStrategy(["cpu:0"]).distribute_dataset(batches)
    >>> isinstance(data, unisono.DistributedDataset), data.cardinality
    (True, 1)
    """

    def __init__(
        self, mesh: ReplicaMesh, options: InputOptions | None, check_iterable_here: Callable[[], None]
    ) -> None:
        self._mesh = mesh
        self._options = options or InputOptions()
        self._check = check_iterable_here

    @abc.abstractmethod
    def __iter__(self) -> DistributedIterator: ...

    @property
    @abc.abstractmethod
    def cardinality(self) -> int:
        """The number of elements, `UNKNOWN_CARDINALITY` (-2) or `INFINITE_CARDINALITY` (-1)."""

    @property
    @abc.abstractmethod
    def element_spec(self) -> PyTree:
        """The structure of `PerReplica` of `unisono.data.TensorSpec`: each replica's shapes and types.

        With one replica `TensorSpec`s alone. The number of rows is None where it may vary.

        Raises:
            InvalidArgumentError: for a generator, whose first batch would be lost.
        """

    @property
    @abc.abstractmethod
    def _host_batches(self) -> UserValue:
        """The global batches on the host, for Keras' `fit`."""

    def __len__(self) -> int:
        size = self.cardinality
        if size < 0:
            raise InvalidTypeError(
                "len() needs data of known, finite size. Received: "
                f"{'infinite data' if size == INFINITE else 'data of unknown size'}. Ask `cardinality`."
            )
        return size

    def __bool__(self) -> bool:
        # Without this, truth would be decided by len().
        return True

    def reduce(self, initial_state: object, reduce_func: Callable[[object, PyTree], object]) -> UserValue:
        """Combine all elements into one value.

        Args:
            initial_state: the first value.
            reduce_func: gets the value so far and an element, and returns the next value.

        Returns:
            The last value.
        """
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state


class SplitDataset(DistributedDataset):
    """An iterable of global batches, each split over the replicas.

    Args:
        dataset: a list of batches, a generator, a function that returns an iterator, a
            `keras.utils.PyDataset`, a torch DataLoader, a `tf.data.Dataset` or a Grain dataset.
        options: how far batches are put ahead.

    Raises:
        InvalidTypeError: when `dataset` is arrays that are not batched, or not an iterable.
        UnsupportedError: for `InputReplicationMode.PER_REPLICA`.
    """

    def __init__(
        self,
        dataset: object,
        mesh: ReplicaMesh,
        options: InputOptions | None = None,
        check_iterable_here: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(mesh, options, check_iterable_here)
        if self._options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise UnsupportedError(
                "InputReplicationMode.PER_REPLICA is only supported in `distribute_datasets_from_function`. "
                "Received: it in the options of `distribute_dataset`, which splits each batch. Leave it out."
            )
        _check_iterable(dataset)
        self._dataset = dataset
        self._is_used = False
        #: True if single numbers in a batch are examples whose rows are missing, not values for all.
        self._strict = isinstance(dataset, Dataset) or hasattr(dataset, "as_numpy_iterator")

    def __iter__(self) -> DistributedIterator:
        self._check()
        note_iteration(self)
        # A second pass over a generator would end at once, without an error.
        if isinstance(self._dataset, Iterator):
            if self._is_used:
                raise InvalidArgumentError(
                    "A generator gives its batches once. Received: a second iteration over the same "
                    f"{type(self._dataset).__name__}. Pass a function that makes a new one: "
                    "`distribute_dataset(lambda: generator())`."
                )
            self._is_used = True
        spec = functools.partial(getattr, self, "element_spec")
        again = None if isinstance(self._dataset, Iterator) else functools.partial(batches_of, self._dataset)
        batches = batches_of(self._dataset)
        return DistributedIterator(batches, self._place, self._options, self._check, spec, again)

    def _place(self, batch: PyTree) -> PyTree:
        check_batched(batch, self._strict)
        return split_batch(batch, self._mesh)

    @property
    def cardinality(self) -> int:
        return _cardinality_of(self._dataset)

    @property
    def element_spec(self) -> PyTree:
        return split_spec(_spec_of(self._dataset), self._mesh.num_replicas, self._mesh.local_replicas)

    @property
    def _host_batches(self) -> UserValue:
        """The source, or a `Dataset` of what Keras' `fit` would not take for data."""
        source = self._dataset
        is_list = isinstance(source, Sequence) and not isinstance(source, Dataset)
        is_function = callable(source) and not hasattr(source, "__iter__")
        return dataset_of(source) if is_list or is_function else source


def dataset_of(source: UserValue) -> Dataset:
    """Return a list of batches, an iterable of them or a function that returns one, as a `Dataset`."""
    if isinstance(source, Sequence):
        return Dataset.from_source(_Elements(source))
    dataset = Dataset.from_generator(lambda: map(_tuples, batches_of(source)))
    return dataset.assert_cardinality(len(source)) if hasattr(source, "__len__") else dataset


class _Elements(Sequence[PyTree]):
    """Batches as elements of a `Dataset`."""

    def __init__(self, batches: Sequence[PyTree]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int | slice) -> PyTree:
        return _tuples(self._batches[index])


class FunctionDataset(DistributedDataset):
    """The input of `distribute_datasets_from_function`: successive elements for successive replicas.

    Args:
        dataset_fn: from `InputContext` to an iterable of one replica's batches.
        options: one input for all replicas of a worker, or one for each.
        group: the workers, each of which makes the input of its own replicas.
    """

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], Iterable[object]],
        mesh: ReplicaMesh,
        options: InputOptions,
        check_iterable_here: Callable[[], None],
        group: ProcessGroup,
    ) -> None:
        super().__init__(mesh, options, check_iterable_here)
        self._group = group
        replicas = mesh.num_replicas
        if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            contexts = [InputContext(replicas, i, replicas) for i in mesh.local_replicas]
        else:
            contexts = [InputContext(group.size, group.index, replicas)]
        # Called here, not at the first iteration: an error in it shows where it was given.
        self._datasets: list[Iterable[PyTree]] = [dataset_fn(context) for context in contexts]

    def __iter__(self) -> DistributedIterator:
        self._check()
        note_iteration(self)
        spec = functools.partial(getattr, self, "element_spec")
        place: Callable[[PyTree], PyTree] = lambda placed: placed  # noqa: E731
        return DistributedIterator(
            self._placed(), place, self._options, self._check, spec, again=self._placed
        )

    def _placed(self) -> Iterator[PyTree]:
        if not self._mesh.spans_processes:
            return per_replica_elements(self._in_turn(), self._mesh)
        return elements_of_workers(self._in_turn(), self._mesh, self._group)

    def _in_turn(self) -> Iterator[PyTree]:
        """The elements for this worker's replicas in turn, until all inputs have ended."""
        if len(self._datasets) == 1:
            yield from batches_of(self._datasets[0])
            return
        iterators = [batches_of(dataset) for dataset in self._datasets]
        while True:
            row = [next(iterator, ENDED) for iterator in iterators]
            if all(element is ENDED for element in row):
                return
            yield from row

    @property
    def cardinality(self) -> int:
        """The number of elements; unknown where other workers make some of them."""
        sizes = [_cardinality_of(dataset) for dataset in self._datasets]
        # Another worker's input may be longer, and only reading it would show that.
        if self._mesh.spans_processes or UNKNOWN in sizes:
            return UNKNOWN
        if INFINITE in sizes:
            return INFINITE
        return max(sizes) if len(sizes) > 1 else -(-sizes[0] // self._mesh.num_replicas)

    @property
    def element_spec(self) -> PyTree:
        spec = jax.tree.map(on_devices, _spec_of(self._datasets[0]))
        if self._mesh.num_replicas == 1:
            return spec
        return jax.tree.map(lambda leaf: PerReplica([leaf] * len(self._mesh.local_replicas)), spec)

    @property
    def _host_batches(self) -> UserValue:
        """The rows of all replicas' elements as one batch, for Keras' `fit`."""
        return Dataset.from_generator(self._global_batches)

    def _global_batches(self) -> Iterator[PyTree]:
        own = joined_rows(self._in_turn(), len(self._mesh.local_replicas))
        return joined_batches(own, self._group)


def joined_rows(iterator: Iterator[PyTree], replicas: int) -> Iterator[PyTree]:
    """Yield global batches of `replicas` successive elements each.

    Args:
        iterator: of one replica's batches, or `ENDED`.
    """
    for first in iterator:
        row = [first, *(next(iterator, ENDED) for _ in range(replicas - 1))]
        parts = [jax.tree.map(as_array, element) for element in row if element is not ENDED]
        for part in parts:
            check_batched(part, strict=True)
        yield _tuples(jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts))


def _tuples(batch: PyTree) -> PyTree:
    """Return a batch in the form of an element: lists are structure in a batch, and arrays in an element."""
    return tuple(batch) if isinstance(batch, list) else batch


def _cardinality_of(dataset: UserValue) -> int:
    if isinstance(dataset, Dataset):
        return dataset.cardinality()
    try:
        return len(dataset)
    except TypeError:
        return UNKNOWN


def _spec_of(dataset: object) -> PyTree:
    """Return the specification of a source's batches: its own, or the first one's with any number of rows."""
    if hasattr(dataset, "element_spec"):
        return jax.tree.map(as_spec, dataset.element_spec)
    if isinstance(dataset, Iterator):
        raise InvalidArgumentError(
            "The specification of a generator is not known before it is read. Received: "
            f"{type(dataset).__name__}. Pass a list or a dataset."
        )
    first = next(batches_of(dataset), ENDED)
    if first is ENDED:
        raise InvalidArgumentError(
            "Data must have an element for its specification to be found. Received: empty data. "
            "Check what the source reads."
        )
    return jax.tree.map(_first_spec, first)


def _first_spec(leaf: object) -> TensorSpec:
    array = np.asarray(as_array(leaf))
    shape = (None, *array.shape[1:]) if array.ndim else ()
    return TensorSpec(shape, array.dtype)


def _check_iterable(dataset: object) -> None:
    # A list of arrays is a list of batches, a tuple of them is `(x, y)`.
    check_no_rows("`distribute_dataset`", dataset)
    is_arrays = isinstance(dataset, tuple) and all(hasattr(x, "shape") for x in dataset)
    if isinstance(dataset, dict) or hasattr(dataset, "shape") or is_arrays:
        raise InvalidTypeError(
            "`distribute_dataset` needs an iterable of batches. Received: arrays. Batch them first, "
            "for example `[(x[i:i+64], y[i:i+64]) for i in range(0, len(x), 64)]`."
        )
    is_text = isinstance(dataset, (str, bytes))
    if is_text or not any([callable(dataset), *(hasattr(dataset, n) for n in ("__iter__", "__getitem__"))]):
        raise InvalidTypeError(
            f"`distribute_dataset` needs an iterable of batches. Received: {type(dataset).__name__}. "
            "Pass a list of batches, a generator, or a dataset."
        )


def batches_of(dataset: UserValue, group: ProcessGroup | None = None) -> Iterator[PyTree]:
    """Return the host batches of any source.

    Args:
        dataset: a dataset of Unisono, Keras, Grain, PyTorch or TensorFlow, an iterable or a function.
        group: the workers between which the batches of a `Dataset` are divided; None reads all of them.

    >>> from unisono.data import Dataset
    >>> [batch.tolist() for batch in batches_of(Dataset.range(3).batch(2))]
    [[0, 1], [2]]
    """
    if group is not None:
        dataset = shard_of_worker(dataset, group)
    # Before `__iter__`, which gives tensors of TensorFlow.
    if hasattr(dataset, "as_numpy_iterator"):
        return iter(dataset.as_numpy_iterator())
    if hasattr(dataset, "num_batches") and hasattr(dataset, "__getitem__"):
        return _py_dataset(dataset)
    if callable(dataset) and not hasattr(dataset, "__iter__"):
        return iter(dataset())
    return iter(dataset)


def _py_dataset(dataset: keras.utils.PyDataset) -> Iterator[PyTree]:
    """Yield the batches of a `keras.utils.PyDataset`, and call its `on_epoch_end`, as Keras does."""
    for i in range(dataset.num_batches):
        yield dataset[i]
    dataset.on_epoch_end()
