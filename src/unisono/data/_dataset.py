"""`Dataset`: the vocabulary of `tf.data` on Grain.

Tests: tests/unit/data/test_dataset_sources.py, tests/unit/data/test_dataset_state.py.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from unisono._checks import checked_whole
from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._reads import DataSet, note_iteration
from unisono._system._object_store import given_place
from unisono.data import _build
from unisono.data._methods import SAVED, FurtherTransforms
from unisono.data._pipeline import _functions, _structure
from unisono.data._pipeline._cardinality import INFINITE, UNKNOWN
from unisono.data._pipeline._indexed import Range, Slices, Source, StoreSource
from unisono.data._pipeline._plan import Node, PipelineIterator, describe
from unisono.data._pipeline._sampling import Random, Selection, chooser
from unisono.data._pipeline._store import FileStore
from unisono.data._pipeline._streams import Generator
from unisono.data._pipeline._structure import Element
from unisono.data._sharding import Options
from unisono.data._signature import as_signature, conform
from unisono.data._transforms import Transforms, node_of


class Dataset(FurtherTransforms, DataSet):
    """A sequence of elements, each a structure of numpy arrays; created by `from_tensor_slices` and others.

    Nothing is read before the iteration, and each `iter` starts a new one. The iterator has `get_state` and
    `set_state`: a pipeline built by the same calls, in this process or another, resumes exactly where the
    state was taken.

    Args:
        node: The plan.
        options: The options of its distribution.

    >>> features, labels = np.zeros((5, 3), np.float32), np.arange(5)
    >>> dataset = Dataset.from_tensor_slices((features, labels)).shuffle(5, seed=0).batch(2)
    >>> [x.shape for x, y in dataset]
    [(2, 3), (2, 3), (1, 3)]
    """

    #: Distinguishes data sets that are components of a window from other components, see `is_dataset`.
    _is_data_set = True
    #: The class of iterators; `tf.data.Dataset` has another, whose elements have `numpy()`.
    _iterator_class = PipelineIterator

    def __init__(self, node: Node, options: Options | None = None) -> None:
        super().__init__()
        if not isinstance(node, Node):
            raise InvalidTypeError(
                f"A `Dataset` is made by one of its functions. Received: Dataset({type(node).__name__}). "
                "Write `Dataset.from_tensor_slices((x, y))`."
            )
        self._node = node
        self._options = options or Options()

    def _derived(self, node: Node, *others: Transforms) -> Self:
        options = self._options
        for other in others:
            options = options._merged(other.options())
        return type(self)(node, options)

    @classmethod
    def _of(cls, dataset: Dataset) -> Self:
        """Return a data set as one of this class."""
        return cls(dataset._node, dataset.options())

    @classmethod
    def from_tensors(cls, tensors: Element) -> Self:
        """Return a data set of one element.

        Args:
            tensors: The element: numbers, strings, lists, arrays, in tuples and dicts; or a data set.

        Returns:
            A data set.

        >>> list(Dataset.from_tensors([1.0, 2.0]).as_numpy_iterator())
        [array([1., 2.], dtype=float32)]
        """
        if isinstance(tensors, Dataset):
            return cls.range(1).map(lambda _: tensors)
        element = _structure.as_element(tensors)
        return cls(Slices(_structure.frozen(_structure.stack([element]))))

    @classmethod
    def from_tensor_slices(cls, tensors: Element) -> Self:
        """Return a data set of the rows of arrays, which are not copied.

        Args:
            tensors: Arrays or lists with the same first dimension, in tuples and dicts.

        Returns:
            A data set.

        Raises:
            InvalidArgumentError: First dimensions differ, or one is missing.

        >>> list(Dataset.from_tensor_slices({"x": [1, 2]}).as_numpy_iterator())
        [{'x': np.int32(1)}, {'x': np.int32(2)}]
        """
        # Read-only, because elements are views of the user's arrays.
        arrays = _structure.frozen(_structure.as_element(tensors))
        # Checked here, and not when the first element is read.
        _structure.leading_size(arrays)
        return cls(Slices(arrays))

    @classmethod
    def from_source(cls, source: Sequence[Any]) -> Self:
        """Return a data set of the records of a random-access source.

        Args:
            source: An object with `len` and `[position]`: a list of elements, a data source of Grain or of
                TFDS.

        Returns:
            A data set.

        >>> list(Dataset.from_source([(1, "a"), (2, "b")]).as_numpy_iterator())
        [(np.int32(1), b'a'), (np.int32(2), b'b')]
        """
        return cls(Source(lambda: source))

    @classmethod
    def from_generator(
        cls,
        generator: Callable[..., Iterable[Any]],
        output_types: Element = None,
        output_shapes: Element = None,
        args: tuple[Any, ...] | None = None,
        output_signature: Element = None,
    ) -> Self:
        """Return a data set of the elements of a generator function, which is called for each iteration.

        Args:
            generator: The function.
            output_types: Structure of dtypes, the old way to describe the elements.
            output_shapes: Structure of shapes, the old way to describe the elements.
            args: Arguments of the function.
            output_signature: Structure of `TensorSpec`; elements are cast to its dtypes, and must have its
                shapes.

        Returns:
            A data set, whose cardinality is unknown.

        Raises:
            InvalidTypeError: `generator` is not callable; while iterating, when it yields another structure.
            InvalidArgumentError: While iterating, when it yields another shape.

        >>> from unisono.data import TensorSpec
        >>> made = Dataset.from_generator(lambda: iter([1, 2]), output_signature=TensorSpec((), "int64"))
        >>> list(made.as_numpy_iterator())
        [np.int64(1), np.int64(2)]
        """
        make = _functions.checked(generator, "from_generator")
        signature = as_signature(output_signature, output_types, output_shapes)
        arguments = args or ()

        def elements() -> Iterable[Element]:
            for value in make(*arguments):
                yield _structure.as_element(value) if signature is None else conform(value, signature)

        return cls(Generator(elements, signature))

    @classmethod
    def range(cls, *args: int, output_type: npt.DTypeLike = np.int64) -> Self:
        """Return a data set of numbers.

        Args:
            *args: Stop; or start and stop; or start, stop and step.
            output_type: Their dtype.

        Returns:
            A data set.

        >>> [int(x) for x in Dataset.range(1, 6, 2)]
        [1, 3, 5]
        """
        numbers = range(
            *[checked_whole(arg, "range's argument", -(2**63), "Write range(10).") for arg in args]
        )
        return cls(Range(numbers.start, numbers.step, len(numbers), np.dtype(output_type)))

    @classmethod
    def zip(cls, *args: Element, datasets: Element = None) -> Self:
        """Return a data set of structures of one element of each data set, as long as the shortest one.

        Args:
            *args: Data sets, or one structure (tuples, dicts) of data sets.
            datasets: The same structure, in older code.

        Returns:
            A data set.

        Raises:
            InvalidTypeError: A part of the structure is not a data set.

        >>> [(int(a), int(b)) for a, b in Dataset.zip((Dataset.range(2), Dataset.range(5, 9)))]
        [(0, 5), (1, 6)]
        """
        structure = datasets if not args else args[0] if len(args) == 1 else args
        parts = [part for _, part in _structure.leaves(structure)]
        nodes = [node_of(part, "zip") for part in parts]
        if not nodes:
            raise InvalidArgumentError(
                "zip needs at least one Dataset. Received: none. Write Dataset.zip((features, labels))."
            )

        def arrange(elements: Sequence[Element]) -> Element:
            remaining = iter(elements)
            return _structure.map_leaves(lambda _: next(remaining), structure)

        return cls._of(parts[0]._derived(_build.zipped(nodes, arrange), *parts[1:]))

    @classmethod
    def list_files(
        cls, file_pattern: str | Sequence[str], shuffle: bool | None = None, seed: int | None = None
    ) -> Self:
        """Return a data set of the names of files, as bytes.

        Args:
            file_pattern: Glob patterns.
            shuffle: Whether to shuffle them, in a new order for each iteration; None means yes.
            seed: The seed of the shuffle.

        Returns:
            A data set.

        Raises:
            InvalidArgumentError: No file matches.
        """
        patterns = [file_pattern] if isinstance(file_pattern, str) else list(file_pattern)
        # Sorted: `glob` returns names in the order of the file system, which may differ between workers.
        names = sorted(name for pattern in patterns for name in glob.glob(pattern))
        if not names:
            raise InvalidArgumentError(
                "list_files needs a pattern that matches files. "
                f"Received: file_pattern={file_pattern!r}, which matches none. "
                f"Write a path that `ls` shows, as '/data/*.txt'; relative ones begin at {os.getcwd()!r}."
            )
        # `files` lets `AutoShardPolicy.AUTO` divide the names, so that a worker opens only its own files.
        files = cls(Slices(_structure.as_element(names), files=True))
        # As in tf.data, None shuffles.
        return files if shuffle is False else files.shuffle(len(names), seed)

    @classmethod
    def counter(cls, start: int = 0, step: int = 1, dtype: npt.DTypeLike = np.int64) -> Self:
        """Return an infinite data set of the numbers `start, start + step, ...`.

        Args:
            start: The first number.
            step: The distance between successive numbers.
            dtype: Their dtype.

        Returns:
            A data set.

        >>> [int(x) for x in Dataset.counter(start=2, step=3).take(3)]
        [2, 5, 8]
        """
        first = checked_whole(start, "start", -(2**63), "Write counter(start=0).")
        distance = checked_whole(step, "step", -(2**63), "Write counter(step=1).")
        return cls(Range(first, distance, INFINITE, np.dtype(dtype)))

    @classmethod
    def random(cls, seed: int | None = None, rerandomize_each_iteration: bool | None = None) -> Self:
        """Return an infinite data set of random whole numbers from 0 to 2**32 - 1.

        Args:
            seed: The seed; None draws one as `shuffle` does.
            rerandomize_each_iteration: Whether each iteration has numbers of its own.

        Returns:
            A data set of int64 numbers.

        >>> numbers = Dataset.random(seed=3).take(2)
        >>> list(numbers) == list(numbers)
        True
        """
        drawn = _functions.seed_or_drawn(seed)
        return cls(Random(drawn, bool(rerandomize_each_iteration), seed is not None))

    @classmethod
    def sample_from_datasets(
        cls,
        datasets: Sequence[Dataset],
        weights: Sequence[float] | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
    ) -> Self:
        """Return a data set that takes each element from one of several data sets, chosen at random.

        Args:
            datasets: The data sets; their elements must have one structure.
            weights: The relative frequency of each; None for equal ones.
            seed: The seed of the order.
            stop_on_empty_dataset: Whether the end of the first data set ends the result; otherwise the
                others continue.
            rerandomize_each_iteration: Whether each iteration has an order of its own.

        Returns:
            A data set.

        >>> sampled = Dataset.sample_from_datasets([Dataset.range(3), Dataset.range(10, 12)], seed=1)
        >>> sorted(int(x) for x in sampled)
        [0, 1, 2, 10, 11]
        """
        nodes = [node_of(dataset, "sample_from_datasets") for dataset in datasets]
        _check_some(nodes, "sample_from_datasets")
        choose = chooser(weights, len(nodes))
        # The end of a data set of weight 0 would never be seen: the result must not wait for it.
        used = tuple(weights is None or weights[number] > 0 for number in range(len(nodes)))
        numbers = Random(_functions.seed_or_drawn(seed), bool(rerandomize_each_iteration), seed is not None)
        choices = _build.mapped(numbers, choose, None)
        node = Selection(choices, tuple(nodes), bool(stop_on_empty_dataset), used)
        return cls._of(datasets[0]._derived(node, *datasets[1:]))

    @classmethod
    def choose_from_datasets(
        cls, datasets: Sequence[Dataset], choice_dataset: Dataset, stop_on_empty_dataset: bool = True
    ) -> Self:
        """Return a data set that takes each element from one of several, in the order of another data set.

        Args:
            datasets: The data sets; their elements must have one structure.
            choice_dataset: A data set of whole numbers from 0 to `len(datasets) - 1`.
            stop_on_empty_dataset: Whether the end of the first data set ends the result; otherwise it is
                skipped.

        Returns:
            A data set.

        >>> letters = [Dataset.from_tensors(x).repeat() for x in ("a", "b")]
        >>> chosen = Dataset.choose_from_datasets(letters, Dataset.from_tensor_slices([0, 1, 1]))
        >>> list(chosen.as_numpy_iterator())
        [b'a', b'b', b'b']
        """
        nodes = [node_of(dataset, "choose_from_datasets") for dataset in datasets]
        _check_some(nodes, "choose_from_datasets")
        choices = node_of(choice_dataset, "choose_from_datasets")
        # The choices are data: any data set may still be chosen.
        node = Selection(choices, tuple(nodes), bool(stop_on_empty_dataset), (True,) * len(nodes))
        return cls._of(datasets[0]._derived(node, *datasets[1:]))

    @classmethod
    def load(
        cls,
        path: str,
        element_spec: Element = None,
        compression: str | None = None,
        reader_func: Callable[..., Any] | None = None,
    ) -> Self:
        """Return the data set that `save` wrote; shuffling it reads nothing in advance.

        Args:
            path: The directory.
            element_spec: Accepted for compatibility; the spec was saved.
            compression: Accepted for compatibility; nothing is compressed.
            reader_func: Receives a data set of data sets, one for each shard, and returns a data set; None
                reads the shard.

        Returns:
            A data set.

        Raises:
            InvalidArgumentError: No data set was saved there.

        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/numbers"
        >>> Dataset.range(3).save(folder)
        >>> len(list(Dataset.load(folder)))
        3
        """
        file = given_place(path) / SAVED
        if not file.is_file():
            raise InvalidArgumentError(
                f"load needs a directory that save wrote. Received: path={path!r}, without the file "
                f"{SAVED!r}. Write dataset.save({path!r}) first."
            )
        loaded = cls(StoreSource(FileStore(file)))
        if reader_func is None:
            return loaded
        # As in tf.data the function receives a data set of shards; `save` writes one.
        shards = cls(Source(lambda: [loaded]))
        made: Dataset = _functions.checked(reader_func, "load")(shards)
        node_of(made, "load's reader_func")
        return cls._of(made)

    def __iter__(self) -> PipelineIterator:
        note_iteration(self)
        return self._iterator_class(self._node)

    def as_numpy_iterator(self) -> PipelineIterator:
        """Return an iterator over numpy elements, as `iter` does.

        >>> int(next(Dataset.range(3).as_numpy_iterator()))
        0
        """
        note_iteration(self)
        return PipelineIterator(self._node)

    def cardinality(self) -> int:
        """Return the number of elements, `INFINITE_CARDINALITY` (-1) or `UNKNOWN_CARDINALITY` (-2).

        >>> Dataset.range(10).batch(4).cardinality(), Dataset.range(3).repeat().cardinality()
        (3, -1)
        """
        return self._node.cardinality

    def __len__(self) -> int:
        size = self._node.cardinality
        if size in (INFINITE, UNKNOWN):
            raise InvalidTypeError(
                "len() needs a data set of known, finite size. "
                f"Received: {'an infinite one' if size == INFINITE else 'one of unknown size'}, {self!r}. "
                "Write take(n), or call cardinality()."
            )
        return size

    def __bool__(self) -> bool:
        # Without this method `bool` would call `len`, which raises for an infinite data set.
        return True

    @property
    def element_spec(self) -> Element:
        """The structure of `TensorSpec` of the elements.

        Where a Python function returns the elements, the first one is computed, and all have its spec.

        >>> Dataset.from_tensor_slices(np.zeros((6, 3), np.float32)).batch(2).element_spec
        TensorSpec(shape=(None, 3), dtype=dtype('float32'))
        """
        return self._node.spec

    def options(self) -> Options:
        """Return a copy of the options of this data set and its inputs."""
        # A copy: derived data sets share one object, which the caller must not change.
        return Options()._merged(self._options)

    def with_options(self, options: Options) -> Self:
        """Return the data set with other options; options that are not set again are kept.

        Args:
            options: The options to set.

        Returns:
            A new data set of the same elements.
        """
        return type(self)(self._node, self._options._merged(options))

    def __repr__(self) -> str:
        return f"<Dataset {describe(self._node)}, cardinality {self._node.cardinality}>"

    __str__ = __repr__


def _check_some(nodes: Sequence[Node], taker: str) -> None:
    if not nodes:
        raise InvalidArgumentError(
            f"{taker} needs data sets. Received: none. Write {taker}([first, second])."
        )
