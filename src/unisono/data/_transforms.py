"""The transformations of `tf.data.Dataset`: each returns a new data set, without reading any element.

Tests: tests/unit/data/test_dataset_transforms.py.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

import grain
import numpy as np

from unisono._checks import checked_whole
from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono.data import _build
from unisono.data._pipeline import _functions
from unisono.data._pipeline._cardinality import AUTOTUNE, INFINITE, SHARD_HINT, UNKNOWN
from unisono.data._pipeline._indexed import Range
from unisono.data._pipeline._interleave import Interleave
from unisono.data._pipeline._plan import Node
from unisono.data._pipeline._streams import Filter
from unisono.data._pipeline._structure import Element
from unisono.data._sharding import Options

#: The default number of data sets that `interleave` reads in turn. tf.data takes the number of cores, which
#: would make the order of elements depend on the machine.
_CYCLE_LENGTH = 4


# A data set of Grain, so that Keras' own data adapters accept it, too. Grain has no types: a type checker
# that knows of it would take any name.
if TYPE_CHECKING:
    _GrainDataset = object
else:
    _GrainDataset = grain.IterDataset


class Transforms(_GrainDataset):
    """The transformations of a data set; `Dataset` is the only subclass."""

    #: The plan of this data set.
    _node: Node
    #: The form of components for users' functions; None for NumPy's arrays, numbers and bytes.
    _view: _functions.View | None = None

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    @abc.abstractmethod
    def options(self) -> Options:
        """Return a copy of the options of this data set."""

    @abc.abstractmethod
    def _derived(self, node: Node, *others: Transforms) -> Self:
        """Return a data set for another plan, with the options of this one and of `others`."""

    def _viewing(self, fn: _functions.Function) -> _functions.Function:
        """Return a user's function, for elements of this data set as its loops give them."""
        return _functions.viewing(fn, self._view)

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Self:
        """Apply a function to each element.

        Args:
            map_func: Receives the components as numpy arrays, a tuple's as separate arguments; returns
                an element: numbers, strings, arrays (also JAX's), tuples and dicts.
            num_parallel_calls: Number of threads, or AUTOTUNE; None for none.
            deterministic: Accepted for compatibility; the order of the elements stays.

        Returns:
            A new data set.

        Raises:
            InvalidTypeError: `map_func` is not callable; while iterating, when it does not return an element.

        >>> from unisono.data import Dataset
        >>> [int(x) for x in Dataset.range(3).map(lambda x: x * 10)]
        [0, 10, 20]
        """
        return self._derived(
            _build.mapped(self._node, _functions.mapping(self._viewing(map_func)), _calls(num_parallel_calls))
        )

    def filter(self, predicate: Callable[..., Any]) -> Self:
        """Keep the elements for which a function returns true.

        Args:
            predicate: Receives the components as `map`'s function does; returns one truth value.

        Returns:
            A new data set, whose cardinality is unknown.

        >>> from unisono.data import Dataset
        >>> [int(x) for x in Dataset.range(5).filter(lambda x: x % 2 == 0)]
        [0, 2, 4]
        """
        return self._derived(Filter(self._node, _functions.predicate(self._viewing(predicate))))

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool | None = True
    ) -> Self:
        """Return the elements in random order, drawn from a buffer that slides over them.

        Args:
            buffer_size: Number of elements to draw from. If it is at least the size of the data, or
                `UNKNOWN_CARDINALITY` and that size is known, every order is equally likely.
            seed: The seed of the orders. None draws one from Python's random state at this call, so that
                `keras.utils.set_random_seed` makes it reproducible.
            reshuffle_each_iteration: Whether each iteration and each repetition has an order of its own;
                the n-th order depends only on `seed` and n.

        Returns:
            A new data set.

        >>> from unisono.data import Dataset
        >>> shuffled = Dataset.range(8).shuffle(8, seed=1)
        >>> sorted(int(x) for x in shuffled)
        [0, 1, 2, 3, 4, 5, 6, 7]
        >>> list(shuffled) == list(shuffled)
        False
        """
        if buffer_size == UNKNOWN and self._node.cardinality >= 0:
            # At least 1, which an empty data set needs to pass the check below.
            buffer_size = max(1, self._node.cardinality)
        size = checked_whole(buffer_size, "buffer_size", 1, "Write shuffle(1000).")
        # The shuffle draws 32-bit numbers.
        size = min(size, 2**32 - 1)
        # Drawn when the pipeline is built, not when it is read: every iteration, and every restored one,
        # derives its order from this number.
        drawn = _functions.seed_or_drawn(seed)
        # As in tf.data, None means yes.
        reshuffle = reshuffle_each_iteration is not False
        return self._derived(_build.shuffled(self._node, size, drawn, reshuffle, seed is not None))

    def repeat(self, count: int | None = None) -> Self:
        """Return all elements several times.

        Args:
            count: The number of repetitions; None or -1 repeats without end.

        Returns:
            A new data set.

        >>> from unisono.data import Dataset
        >>> [int(x) for x in Dataset.range(2).repeat(2)]
        [0, 1, 0, 1]
        """
        times = (
            -1
            if count is None
            else checked_whole(count, "count", -1, "Write repeat() to repeat without end.")
        )
        return self._derived(_build.repeated(self._node, times))

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Self:
        """Stack successive elements.

        Args:
            batch_size: Number of elements in a batch.
            drop_remainder: Whether to drop a last batch that is smaller.
            num_parallel_calls: Number of threads that compute batches ahead, or AUTOTUNE; None for none.
            deterministic: Accepted for compatibility; the order of the elements stays.

        Returns:
            A new data set, whose components have a new first dimension.

        Raises:
            InvalidArgumentError: `batch_size` is less than 1; while iterating, when shapes differ.

        >>> from unisono.data import Dataset
        >>> [x.tolist() for x in Dataset.range(5).batch(2)]
        [[0, 1], [2, 3], [4]]
        """
        size = checked_whole(batch_size, "batch_size", 1, "Write batch(32).")
        node = _build.batched(self._node, size, bool(drop_remainder))
        return self._derived(_build.made_by_threads(node, _calls(num_parallel_calls)))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Element = None,
        padding_values: Element = None,
        drop_remainder: bool = False,
    ) -> Self:
        """Stack successive elements, padded at their ends to one shape.

        Args:
            batch_size: Number of elements in a batch.
            padded_shapes: Shape of each component, in the structure of the elements, with None for the size
                of the longest element in a batch; None for all dimensions.
            padding_values: Values to pad with, one for all or in the structure of the elements; None means 0
                and b"".
            drop_remainder: Whether to drop a last batch that is smaller.

        Returns:
            A new data set.

        >>> import numpy as np
        >>> from unisono.data import Dataset
        >>> [x.tolist() for x in Dataset.range(1, 4).map(lambda n: np.full(n, n)).padded_batch(3)]
        [[[1, 0, 0], [2, 2, 0], [3, 3, 3]]]
        """
        size = checked_whole(batch_size, "batch_size", 1, "Write padded_batch(32).")
        return self._derived(
            _build.padded(self._node, size, bool(drop_remainder), padded_shapes, padding_values)
        )

    def unbatch(self) -> Self:
        """Return the rows of each element.

        Returns:
            A new data set, whose components lack the first dimension.

        >>> from unisono.data import Dataset
        >>> [int(x) for x in Dataset.range(3).batch(2).unbatch()]
        [0, 1, 2]
        """
        return self._derived(_build.unbatched(self._node))

    def take(self, count: int) -> Self:
        """Return the first elements.

        Args:
            count: The number of elements; -1 for all.

        Returns:
            A new data set.

        >>> from unisono.data import Dataset
        >>> [int(x) for x in Dataset.range(5).take(2)]
        [0, 1]
        """
        return self._derived(_build.taken(self._node, checked_whole(count, "count", -1, "Write take(10).")))

    def skip(self, count: int) -> Self:
        """Leave out the first elements.

        Args:
            count: The number of elements; -1 for all.

        Returns:
            A new data set.

        >>> from unisono.data import Dataset
        >>> [int(x) for x in Dataset.range(5).skip(2)]
        [2, 3, 4]
        """
        return self._derived(_build.skipped(self._node, checked_whole(count, "count", -1, "Write skip(10).")))

    def shard(self, num_shards: int, index: int) -> Self:
        """Return every `num_shards`-th element.

        Args:
            num_shards: Number of shards. SHARD_HINT for both arguments leaves them to a distribution whose
                auto-shard policy is HINT.
            index: Number of this shard, from 0.

        Returns:
            A new data set.

        Raises:
            InvalidArgumentError: `index` is not below `num_shards`.

        >>> from unisono.data import Dataset
        >>> [int(x) for x in Dataset.range(5).shard(2, index=1)]
        [1, 3]
        """
        if num_shards == SHARD_HINT and index == SHARD_HINT:
            # All elements, until `hint_sharded` replaces start and step.
            return self._derived(_build.strided(self._node, 0, 1, hinted=True))
        shards = checked_whole(num_shards, "num_shards", 1, "Write shard(num_workers, worker_index).")
        number = checked_whole(index, "index", 0, "Write shard(num_workers, worker_index).")
        if number >= shards:
            raise InvalidArgumentError(
                f"index must be below num_shards. Received: num_shards={shards}, index={number}. "
                "Write shard(num_workers, worker_index)."
            )
        return self._derived(_build.strided(self._node, number, shards))

    def concatenate(self, dataset: Transforms) -> Self:
        """Append the elements of another data set.

        Args:
            dataset: The other data set; its elements must have the same structure.

        Returns:
            A new data set.

        >>> from unisono.data import Dataset
        >>> [int(x) for x in Dataset.range(2).concatenate(Dataset.range(5, 7))]
        [0, 1, 5, 6]
        """
        return self._derived(_build.concatenated(self._node, node_of(dataset, "concatenate")), dataset)

    def interleave(
        self,
        map_func: Callable[..., Transforms],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Self:
        """Map each element to a data set, and return the elements of several of these in turn.

        Args:
            map_func: Receives the components as `map`'s function does; returns a data set.
            cycle_length: Number of data sets that are open at the same time; None or AUTOTUNE means 4.
            block_length: Number of successive elements from one data set; None means 1.
            num_parallel_calls: With any number, a thread reads ahead from each open data set.
            deterministic: Accepted for compatibility; the order is always the same.

        Returns:
            A new data set, whose cardinality is unknown.

        >>> from unisono.data import Dataset
        >>> [int(x) for x in Dataset.range(1, 4).interleave(lambda x: Dataset.from_tensors(x).repeat(2), 2)]
        [1, 2, 1, 2, 3, 3]
        """
        cycle = _CYCLE_LENGTH if cycle_length in (None, AUTOTUNE) else cycle_length
        cycle = checked_whole(cycle, "cycle_length", 1, "Write interleave(fn, cycle_length=4).")
        block = checked_whole(
            block_length or 1, "block_length", 1, "Write interleave(fn, 4, block_length=1)."
        )
        ahead = 1 if _calls(num_parallel_calls) else 0
        return self._derived(
            Interleave(self._node, _making(self._viewing(map_func), "interleave"), cycle, block, ahead)
        )

    def flat_map(self, map_func: Callable[..., Transforms]) -> Self:
        """Map each element to a data set, and return the concatenation of these.

        Args:
            map_func: Receives the components as `map`'s function does; returns a data set.

        Returns:
            A new data set, whose cardinality is unknown.

        >>> from unisono.data import Dataset
        >>> [int(x) for x in Dataset.range(4).flat_map(Dataset.range)]
        [0, 0, 1, 0, 1, 2]
        """
        return self._derived(Interleave(self._node, _making(self._viewing(map_func), "flat_map"), 1, 1, 0))

    def enumerate(self, start: int = 0) -> Self:
        """Pair each element with its number.

        Args:
            start: The first number.

        Returns:
            A new data set of pairs.

        >>> from unisono.data import Dataset
        >>> [(int(n), int(x)) for n, x in Dataset.range(7, 9).enumerate(start=1)]
        [(1, 7), (2, 8)]
        """
        first = checked_whole(start, "start", -(2**63), "Write enumerate(start=0).")
        # Infinite, because the size may be unknown: `zip` ends with the data.
        numbers = Range(first, 1, INFINITE, np.dtype(np.int64))
        return self._derived(_build.zipped([numbers, self._node], tuple))

    def cache(self, filename: str = "") -> Self:
        """Store the elements of the first iteration for all others, which have the same shuffled order.

        Args:
            filename: The file to store them in, which appears when it is complete; if it exists, it is read
                instead of the pipeline. An empty name stores them in memory.

        Returns:
            A new data set.

        >>> from unisono.data import Dataset
        >>> [int(x) for x in Dataset.range(3).cache()]
        [0, 1, 2]
        """
        return self._derived(_build.cached(self._node, str(filename)))

    def prefetch(self, buffer_size: int | None = None) -> Self:
        """Compute elements ahead, in a thread.

        Args:
            buffer_size: The number of elements; None or AUTOTUNE means 4, 0 disables it.

        Returns:
            A new data set of the same elements.

        >>> from unisono.data import AUTOTUNE, Dataset
        >>> [int(x) for x in Dataset.range(3).prefetch(AUTOTUNE)]
        [0, 1, 2]
        """
        if buffer_size is not None:
            buffer_size = checked_whole(
                buffer_size, "buffer_size", -1, "Write prefetch(unisono.data.AUTOTUNE)."
            )
        return self._derived(_build.read_ahead(self._node, buffer_size))

    def apply(self, transformation_func: Callable[[Self], Transforms]) -> Transforms:
        """Return the result of a function of this data set.

        Args:
            transformation_func: Receives the data set and returns one.

        Returns:
            The data set that the function returns.

        >>> from unisono.data import Dataset
        >>> [int(x) for x in Dataset.range(5).apply(lambda ds: ds.skip(3))]
        [3, 4]
        """
        result: Transforms = _functions.checked(transformation_func, "apply")(self)
        node_of(result, "apply's function")
        return result

    def reduce(self, initial_state: Element, reduce_func: Callable[[Element, Element], Element]) -> Element:
        """Combine all elements into one.

        Args:
            initial_state: The first value.
            reduce_func: Receives the value so far and an element (a tuple as one argument), and returns the
                next value.

        Returns:
            The last value.

        >>> from unisono.data import Dataset
        >>> int(Dataset.range(5).reduce(0, lambda total, x: total + x))
        10
        """
        state = initial_state
        for element in self:
            state = _functions.checked(reduce_func, "reduce")(state, element)
        return state


def node_of(dataset: object, taker: str) -> Node:
    """Return the plan of a data set.

    Args:
        taker: The name of the function that needs it, for the error.

    Raises:
        InvalidTypeError: `dataset` is not a `Dataset`.
    """
    if not isinstance(dataset, Transforms):
        raise InvalidTypeError(
            f"{taker} needs a Dataset. Received: {dataset!r:.200} of type {type(dataset).__name__}. "
            "Write Dataset.from_tensor_slices(...)."
        )
    return dataset._node


def _making(fn: Callable[..., Transforms], method: str) -> Callable[[Element], Node]:
    _functions.checked(fn, method)
    return lambda element: node_of(_functions.call(fn, element), f"{method}'s function")


def _calls(number: int | None) -> int | None:
    if number is None or number == AUTOTUNE:
        return number
    return checked_whole(number, "num_parallel_calls", 1, "Write num_parallel_calls=unisono.data.AUTOTUNE.")
