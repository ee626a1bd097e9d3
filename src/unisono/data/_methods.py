"""Further transformations of `tf.data.Dataset`: windows, groups, other batches, samples, files.

Tests: tests/unit/data/test_dataset_further.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from unisono._checks import checked_whole
from unisono._errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from unisono._system._object_store import given_place
from unisono._types import ArrayLike, UserValue
from unisono.data import _build
from unisono.data._pipeline import _functions, _structure
from unisono.data._pipeline._indexed import ElementList
from unisono.data._pipeline._padding import padded_spec
from unisono.data._pipeline._passing import IgnoreErrors, Scan, SizeCheck, TakeWhile, Unique
from unisono.data._pipeline._plan import IndexedNode, Node
from unisono.data._pipeline._sampling import Resample, distribution
from unisono.data._pipeline._store import write_all
from unisono.data._pipeline._structure import Element
from unisono.data._pipeline._windows import (
    Groups,
    Rebatch,
    StreamWindows,
    Windows,
    bucket_of,
    check_buckets,
    padded_to,
)
from unisono.data._transforms import Transforms, node_of

#: The name of the file in the directory that `save` writes.
SAVED = "elements"


class FurtherTransforms(Transforms):
    """The less common transformations; `Dataset` is the only subclass.

    Apart from `Transforms` only because of their number.
    """

    def window(
        self, size: int, shift: int | None = None, stride: int = 1, drop_remainder: bool = False
    ) -> Self:
        """Return windows of successive elements, in which each component is a data set.

        Args:
            size: Number of elements of a window.
            shift: Distance between the starts of successive windows; None means `size`.
            stride: Distance between the elements of a window.
            drop_remainder: Whether to drop windows with fewer elements.

        Returns:
            A new data set.

        >>> from unisono.data import Dataset
        >>> windows = Dataset.range(5).window(3, shift=1, drop_remainder=True)
        >>> [x.tolist() for x in windows.flat_map(lambda window: window.batch(3))]
        [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
        """
        hint = "Write window(5, shift=1)."
        numbers = (size, "size"), (size if shift is None else shift, "shift"), (stride, "stride")
        length, distance, every = (checked_whole(number, name, 1, hint) for number, name in numbers)
        drop = bool(drop_remainder)
        if isinstance(self._node, IndexedNode):
            return self._derived(Windows(self._node, self._derived, length, distance, every, drop))
        return self._derived(StreamWindows(self._node, self._derived, length, distance, every, drop))

    def group_by_window(
        self,
        key_func: Callable[..., Any],
        reduce_func: Callable[[Any, Any], Transforms],
        window_size: int | None = None,
        window_size_func: Callable[[Any], Any] | None = None,
    ) -> Self:
        """Group elements with equal keys, and map each group to a data set.

        Args:
            key_func: Receives the components as `map`'s function does; returns a whole number.
            reduce_func: Receives the key and a data set of up to `window_size` elements; returns a data set,
                often `elements.batch(...)`.
            window_size: Number of elements of a group. Incomplete groups follow at the end, in the order of
                their keys.
            window_size_func: Returns the number of elements for a key, instead of `window_size`.

        Returns:
            A new data set, whose cardinality is unknown.

        Raises:
            InvalidArgumentError: Not exactly one of the two sizes is given.

        >>> from unisono.data import Dataset
        >>> grouped = Dataset.range(5).group_by_window(lambda x: x % 2, lambda key, group: group.batch(2), 2)
        >>> [x.tolist() for x in grouped]
        [[0, 2], [1, 3], [4]]
        """
        if (window_size is None) == (window_size_func is None):
            raise InvalidArgumentError(
                "group_by_window needs one of window_size and window_size_func. "
                f"Received: window_size={window_size}, window_size_func={window_size_func}. "
                "Write group_by_window(key_func, reduce_func, window_size=32)."
            )
        _functions.checked(reduce_func, "group_by_window")
        size_of = window_size_func or (lambda key: window_size)

        def reduced(key: int, elements: list[Element]) -> Node:
            # tf.data passes keys as int64.
            made = reduce_func(np.int64(key), self._derived(ElementList(elements)))
            return node_of(made, "group_by_window's function")

        def checked_size(key: int) -> int:
            return checked_whole(size_of(np.int64(key)), "window_size", 1, "Write window_size=32.")

        return self._derived(
            Groups(self._node, _numbering(self._viewing(key_func), "key_func"), reduced, checked_size)
        )

    def bucket_by_sequence_length(
        self,
        element_length_func: Callable[..., Any],
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        padded_shapes: Element = None,
        padding_values: Element = None,
        pad_to_bucket_boundary: bool = False,
        no_padding: bool = False,
        drop_remainder: bool = False,
    ) -> Self:
        """Batch elements of similar length together, padded.

        Args:
            element_length_func: Receives the components as `map`'s function does; returns the length.
            bucket_boundaries: Increasing lengths; an element as long as one belongs to the next bucket.
            bucket_batch_sizes: Batch size of each bucket: one more number than boundaries.
            padded_shapes: As in `padded_batch`.
            padding_values: As in `padded_batch`.
            pad_to_bucket_boundary: Whether to pad dimensions of unknown size to one less than the bucket's
                boundary, instead of to the longest element; no element may be longer than the last one.
            no_padding: Whether all elements of a batch must have one shape instead.
            drop_remainder: Whether to drop last batches that are smaller.

        Returns:
            A new data set, whose cardinality is unknown.

        Raises:
            InvalidArgumentError: Boundaries and sizes do not match; while iterating, an element is too long.

        >>> from unisono.data import Dataset
        >>> rows = Dataset.range(1, 5).map(lambda n: np.full(n, n))
        >>> [x.tolist() for x in rows.bucket_by_sequence_length(len, [3], [2, 2])]
        [[[1, 0], [2, 2]], [[3, 3, 3, 0], [4, 4, 4, 4]]]
        """
        check_buckets(bucket_boundaries, bucket_batch_sizes)
        sizes = [checked_whole(n, "bucket_batch_sizes", 1, "Write [64, 32, 16].") for n in bucket_batch_sizes]
        length_of = _numbering(self._viewing(element_length_func), "element_length_func")
        parent = self._node

        def key_of(element: Element) -> int:
            bucket = bucket_of(length_of(element), bucket_boundaries)
            # The last bucket has no boundary to pad to.
            if pad_to_bucket_boundary and bucket == len(bucket_boundaries):
                raise InvalidArgumentError(
                    "With pad_to_bucket_boundary=True, elements must be shorter than the last boundary. "
                    f"Received: length {length_of(element)} with boundaries {list(bucket_boundaries)}. "
                    "Add a boundary, or filter long elements."
                )
            return bucket

        def batched(bucket: int, elements: list[Element]) -> Node:
            source = ElementList(elements)
            if no_padding:
                return _build.batched(source, sizes[bucket], drop_remainder)
            shapes = padded_shapes
            if pad_to_bucket_boundary:
                # One less, as in tf.data: an element as long as the boundary belongs to the next bucket.
                shapes = padded_to(parent.spec, shapes, bucket_boundaries[bucket] - 1)
            return _build.padded(source, sizes[bucket], drop_remainder, shapes, padding_values)

        # A function, because the parent may have to compute an element to find its spec.
        spec = None if no_padding else lambda: padded_spec(parent.spec, None, padded_shapes)
        return self._derived(Groups(parent, key_of, batched, lambda bucket: sizes[bucket], spec))

    def rebatch(self, batch_size: int | Sequence[int], drop_remainder: bool = False) -> Self:
        """Return the rows of batches in batches of another size.

        Args:
            batch_size: The size, or several that take turns.
            drop_remainder: Whether to drop a last batch that is smaller.

        Returns:
            A new data set.

        >>> from unisono.data import Dataset
        >>> [x.tolist() for x in Dataset.range(7).batch(4).rebatch(3)]
        [[0, 1, 2], [3, 4, 5], [6]]
        """
        given = np.atleast_1d(np.asarray(batch_size)).tolist()
        sizes = tuple(checked_whole(size, "batch_size", 1, "Write rebatch(32).") for size in given)
        if not sizes:
            raise InvalidArgumentError(
                "rebatch needs at least one size. Received: batch_size=[]. Write rebatch(32)."
            )
        return self._derived(Rebatch(self._node, sizes, bool(drop_remainder)))

    def take_while(self, predicate: Callable[..., Any]) -> Self:
        """Return the elements before the first for which a function returns false.

        Args:
            predicate: Receives the components as `map`'s function does; returns one truth value.

        Returns:
            A new data set, whose cardinality is unknown.

        >>> from unisono.data import Dataset
        >>> [int(x) for x in Dataset.range(10).take_while(lambda x: x < 3)]
        [0, 1, 2]
        """
        return self._derived(TakeWhile(self._node, _functions.predicate(self._viewing(predicate))))

    def scan(self, initial_state: object, scan_func: Callable[[Any, Any], Any]) -> Self:
        """Apply a function with a state to each element.

        Args:
            initial_state: The state at the start of each iteration.
            scan_func: Receives the state and an element (a tuple as one argument); returns a pair of the new
                state and an element.

        Returns:
            A new data set. To resume its iterator, the elements before are computed again.

        >>> from unisono.data import Dataset
        >>> [int(x) for x in Dataset.range(1, 5).scan(0, lambda total, x: (total + x, total + x))]
        [1, 3, 6, 10]
        """
        _functions.checked(scan_func, "scan")

        def scanned(state: object, element: Element) -> tuple[UserValue, Element]:
            result = scan_func(state, element)
            if not isinstance(result, tuple) or len(result) != 2:
                raise InvalidTypeError(
                    "scan()'s function must return a pair of the new state and an element. "
                    f"Received: {result!r:.100}. Write `return state, element`."
                )
            return result[0], _structure.as_element(result[1])

        return self._derived(Scan(self._node, initial_state, scanned))

    def unique(self) -> Self:
        """Return the first of equal elements, which must be numbers, strings or arrays of numbers.

        Returns:
            A new data set, whose cardinality is unknown.

        >>> from unisono.data import Dataset
        >>> [int(x) for x in Dataset.from_tensor_slices([1, 37, 2, 37, 2, 1]).unique()]
        [1, 37, 2]
        """
        return self._derived(Unique(self._node))

    def ignore_errors(self, log_warning: bool = False) -> Self:
        """Skip elements whose computation raises an error.

        Args:
            log_warning: Whether to log each error as a warning.

        Returns:
            A new data set, whose cardinality is unknown. An error is raised if the source cannot continue
            after it, as a generator cannot.

        >>> from unisono.data import Dataset
        >>> [int(x) for x in Dataset.range(-1, 2).map(lambda x: 6 // int(x)).ignore_errors()]
        [-6, 6]
        """
        return self._derived(IgnoreErrors(self._node, bool(log_warning)))

    def rejection_resample(
        self,
        class_func: Callable[..., Any],
        target_dist: ArrayLike,
        initial_dist: ArrayLike = None,
        seed: int | None = None,
    ) -> Self:
        """Drop elements at random, so that their classes have the wanted distribution.

        Args:
            class_func: Receives the components as `map`'s function does; returns the class, from 0.
            target_dist: Share of each class in the result.
            initial_dist: Share of each class in the data; None estimates it while the data are read.
            seed: The seed of the random choices.

        Returns:
            A new data set of pairs of class and element, whose cardinality is unknown.

        >>> from unisono.data import Dataset
        >>> mostly_ones = Dataset.range(1000).map(lambda x: int(x % 10 != 0))
        >>> even = mostly_ones.rejection_resample(lambda x: x, [0.5, 0.5], [0.1, 0.9], seed=1)
        >>> [int(x) for _, x in even].count(0)  # all of the rare class
        100
        """
        target = distribution(target_dist, "target_dist")
        initial = None if initial_dist is None else distribution(initial_dist, "initial_dist")
        if initial is not None and len(initial) != len(target):
            raise InvalidArgumentError(
                "target_dist and initial_dist must have one share for each class. "
                f"Received: {len(target)} and {len(initial)} shares. Give both for the same classes."
            )
        class_of = _numbering(self._viewing(class_func), "class_func")
        drawn = _functions.seed_or_drawn(seed)
        return self._derived(Resample(self._node, drawn, True, seed is not None, class_of, target, initial))

    def assert_cardinality(self, expected_cardinality: int) -> Self:
        """Declare the number of elements, where it is unknown.

        Args:
            expected_cardinality: The number of elements, or `INFINITE_CARDINALITY`.

        Returns:
            A new data set, which raises an error during the iteration if there are more or fewer.

        >>> from unisono.data import Dataset
        >>> len(Dataset.range(9).filter(lambda x: x < 5).assert_cardinality(5))
        5
        """
        size = checked_whole(expected_cardinality, "expected_cardinality", -1, "Write the number.")
        return self._derived(SizeCheck(self._node, size))

    def snapshot(
        self,
        path: str,
        compression: str | None = "AUTO",
        reader_func: Callable[..., Any] | None = None,
        shard_func: Callable[..., Any] | None = None,
    ) -> Self:
        """Store the elements of the first iteration in a directory, as `cache` does in a file.

        Args:
            path: The directory.
            compression: Accepted for compatibility; nothing is compressed.
            reader_func: Must be None; shuffle after the snapshot instead.
            shard_func: Must be None, because there is one shard.

        Returns:
            A new data set.
        """
        _not_supported("snapshot", reader_func=reader_func, shard_func=shard_func)
        return self._derived(_build.cached(self._node, given_place(path) / "snapshot"))

    def save(
        self,
        path: str,
        compression: str | None = None,
        shard_func: Callable[..., Any] | None = None,
        checkpoint_args: None = None,
    ) -> None:
        """Write all elements into a directory, from which `Dataset.load` reads them.

        The file appears, and replaces an existing one, when it is complete.

        Args:
            path: The directory.
            compression: Accepted for compatibility; nothing is compressed.
            shard_func: Must be None, because there is one shard.
            checkpoint_args: Must be None.
        """
        _not_supported("save", shard_func=shard_func, checkpoint_args=checkpoint_args)

        def elements() -> Iterator[Element]:
            # The spec first: `load` then knows it without reading an element, also of an empty data set.
            yield _structure.map_leaves(_structure.spec_as_bytes, self._node.spec)
            yield from self

        write_all(given_place(path) / SAVED, elements())

    def get_single_element(self) -> Element:
        """Return the only element.

        Raises:
            InvalidArgumentError: There is no element, or more than one.

        >>> from unisono.data import Dataset
        >>> Dataset.range(3).batch(3).get_single_element().tolist()
        [0, 1, 2]
        """
        iterator = iter(self)
        # A sentinel, because None is a valid element.
        missing = object()
        element = next(iterator, missing)
        if element is missing or next(iterator, missing) is not missing:
            count = "none" if element is missing else "more than one"
            raise InvalidArgumentError(
                "get_single_element needs a data set of one element. "
                f"Received: {count}, {self!r}. Write take(1) first."
            )
        return element


def _numbering(fn: Callable[..., Any], name: str) -> Callable[[Element], int]:
    """Return the user's function from an element to a whole number, with a check of its result."""
    _functions.checked(fn, name)

    def number(element: Element) -> int:
        result = np.asarray(_functions.call(fn, element))
        if result.shape or result.dtype.kind not in "biu":
            raise InvalidTypeError(
                f"{name} must return a whole number. Received: shape {result.shape}, dtype {result.dtype}. "
                "Write int(...)."
            )
        return int(result)

    return number


def _not_supported(method: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            # Not ignored, because these functions decide which elements are read and in which order.
            raise UnsupportedError(
                f"{method}() does not support {name}. Received: {name}={value!r:.100}. "
                "Leave it out, and use the methods `shuffle`, `shard` and `interleave`."
            )
