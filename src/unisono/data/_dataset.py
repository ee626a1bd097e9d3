"""`Dataset`: the vocabulary of `tf.data` on Grain."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._reads import DataSet, note_iteration
from unisono.data import _build, _functions, _structure
from unisono.data._cardinality import INFINITE, UNKNOWN
from unisono.data._indexed import Range, Slices, Source
from unisono.data._options import Options
from unisono.data._plan import Node, PipelineIterator, describe
from unisono.data._signature import as_signature, conform
from unisono.data._streams import Generator
from unisono.data._structure import Element
from unisono.data._transforms import Transforms, node_of


class Dataset(Transforms, DataSet):
    """A sequence of elements, each a structure of numpy arrays; made by `from_tensor_slices` and its like.

    Nothing is read before it is iterated, and each `iter` begins anew. The iterator has `get_state` and
    `set_state`: a pipeline built by the same calls, in this process or another, goes on exactly where the
    state was taken.

    Args:
        node: The plan.
        options: How it is to be distributed.

    >>> features, labels = np.zeros((5, 3), np.float32), np.arange(5)
    >>> dataset = Dataset.from_tensor_slices((features, labels)).shuffle(5, seed=0).batch(2)
    >>> [x.shape for x, y in dataset]
    [(2, 3), (2, 3), (1, 3)]
    """

    def __init__(self, node: Node, options: Options | None = None) -> None:
        super().__init__()
        self._node = node
        self._options = options or Options()

    @property
    def node(self) -> Node:
        """The plan that this data set stands for."""
        return self._node

    def derived(self, node: Node, *others: Transforms) -> Self:
        """Returns a data set for another plan, with the options of this one and of `others`."""
        options = self._options
        for other in others:
            options = options.merged(other.options())
        return type(self)(node, options)

    @staticmethod
    def from_tensors(tensors: Element) -> Dataset:
        """Returns a data set of one element.

        Args:
            tensors: The element: numbers, strings, lists, arrays, in tuples and dicts.

        Returns:
            A data set.

        >>> list(Dataset.from_tensors([1.0, 2.0]))
        [array([1., 2.], dtype=float32)]
        """
        element = _structure.as_element(tensors)
        return Dataset(Slices(_structure.frozen(_structure.stack([element]))))

    @staticmethod
    def from_tensor_slices(tensors: Element) -> Dataset:
        """Returns a data set of the rows of arrays, which are not copied.

        Args:
            tensors: Arrays or lists with the same first dimension, in tuples and dicts.

        Returns:
            A data set.

        Raises:
            InvalidArgumentError: First dimensions differ, or one is missing.

        >>> list(Dataset.from_tensor_slices({"x": [1, 2]}))
        [{'x': np.int32(1)}, {'x': np.int32(2)}]
        """
        arrays = _structure.frozen(_structure.as_element(tensors))
        _structure.leading_size(arrays)
        return Dataset(Slices(arrays))

    @staticmethod
    def from_source(source: Sequence[Any]) -> Dataset:
        """Returns a data set of the records of a random-access source.

        Args:
            source: Anything with `len` and `[position]`: a list of elements, a data source of Grain or of
                TFDS.

        Returns:
            A data set.

        >>> list(Dataset.from_source([(1, "a"), (2, "b")]))
        [(np.int32(1), b'a'), (np.int32(2), b'b')]
        """
        return Dataset(Source(lambda: source))

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Any]],
        output_types: Element = None,
        output_shapes: Element = None,
        args: tuple[Any, ...] | None = None,
        output_signature: Element = None,
    ) -> Dataset:
        """Returns a data set of what a generator function yields; it is called again for each iteration.

        Args:
            generator: The function.
            output_types: Structure of dtypes, the old way to describe the elements.
            output_shapes: Structure of shapes, the old way to describe the elements.
            args: Arguments of the function.
            output_signature: Structure of `TensorSpec`; elements are cast to its dtypes and held to its
                shapes.

        Returns:
            A data set, whose cardinality is unknown.

        Raises:
            InvalidTypeError: `generator` cannot be called; while iterating, where it gives another structure.
            InvalidArgumentError: While iterating, where it gives another shape.

        >>> from unisono.data import TensorSpec
        >>> list(Dataset.from_generator(lambda: iter([1, 2]), output_signature=TensorSpec((), "int64")))
        [np.int64(1), np.int64(2)]
        """
        make = _functions.checked(generator, "from_generator")
        signature = as_signature(output_signature, output_types, output_shapes)
        arguments = args or ()

        def elements() -> Iterable[Element]:
            for value in make(*arguments):
                yield _structure.as_element(value) if signature is None else conform(value, signature)

        return Dataset(Generator(elements, signature))

    @staticmethod
    def range(*args: int, output_type: Any = np.int64) -> Dataset:
        """Returns a data set of numbers.

        Args:
            *args: Stop; or start and stop; or start, stop and step.
            output_type: Their dtype.

        Returns:
            A data set.

        >>> [int(x) for x in Dataset.range(1, 6, 2)]
        [1, 3, 5]
        """
        numbers = range(
            *[_functions.whole(arg, "range's argument", -(2**63), "Write range(10).") for arg in args]
        )
        return Dataset(Range(numbers.start, numbers.step, len(numbers), np.dtype(output_type)))

    @staticmethod
    def zip(*args: Any, datasets: Any = None) -> Dataset:
        """Returns a data set of elements side by side, as long as the shortest input.

        Args:
            *args: Data sets, or one structure (tuples, dicts) of data sets.
            datasets: The same structure, as older code writes it.

        Returns:
            A data set.

        Raises:
            InvalidTypeError: Something in the structure is no data set.

        >>> [(int(a), int(b)) for a, b in Dataset.zip((Dataset.range(2), Dataset.range(5, 9)))]
        [(0, 5), (1, 6)]
        """
        structure = datasets if not args else args[0] if len(args) == 1 else args
        parts = [part for _, part in _structure.leaves(structure)]
        nodes = [node_of(part, "zip") for part in parts]
        if not nodes:
            raise InvalidArgumentError(
                "zip needs a Dataset. Received: none. Write Dataset.zip((features, labels))."
            )

        def arrange(elements: Sequence[Element]) -> Element:
            remaining = iter(elements)
            return _structure.map_leaves(lambda _: next(remaining), structure)

        first: Dataset = parts[0]
        return first.derived(_build.zipped(nodes, arrange), *parts[1:])

    @staticmethod
    def list_files(
        file_pattern: str | Sequence[str], shuffle: bool | None = None, seed: int | None = None
    ) -> Dataset:
        """Returns a data set of the names of files, as bytes.

        Args:
            file_pattern: Glob patterns.
            shuffle: Whether to shuffle them, anew for each iteration; None means yes.
            seed: Of the shuffle.

        Returns:
            A data set.

        Raises:
            InvalidArgumentError: No file matches.
        """
        patterns = [file_pattern] if isinstance(file_pattern, str) else list(file_pattern)
        names = sorted(name for pattern in patterns for name in glob.glob(pattern))
        if not names:
            raise InvalidArgumentError(
                "list_files needs a pattern that matches files. "
                f"Received: file_pattern={file_pattern!r}, which matches none. "
                "Write an absolute path, as in '/data/*.txt'."
            )
        files = Dataset(Slices(_structure.as_element(names), files=True))
        return files if shuffle is False else files.shuffle(len(names), seed)

    def __iter__(self) -> PipelineIterator:
        note_iteration(self)
        return PipelineIterator(self._node)

    def cardinality(self) -> int:
        """Returns the number of elements, `INFINITE_CARDINALITY` (-1) or `UNKNOWN_CARDINALITY` (-2).

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
                "Write take(n), or ask cardinality()."
            )
        return size

    def __bool__(self) -> bool:
        # Without this, truth would be decided by len(), which an infinite data set lacks.
        return True

    @property
    def element_spec(self) -> Element:
        """The structure of `TensorSpec` of the elements.

        Where a Python function makes them, the first element is read to find it, and stands for all.

        >>> Dataset.from_tensor_slices(np.zeros((6, 3), np.float32)).batch(2).element_spec
        TensorSpec(shape=(None, 3), dtype=dtype('float32'))
        """
        return self._node.spec

    def options(self) -> Options:
        """Returns a copy of the options of this data set and its inputs."""
        return Options().merged(self._options)

    def with_options(self, options: Options) -> Dataset:
        """Sets options; those set before stay, unless set again.

        Args:
            options: What to set.

        Returns:
            A new data set of the same elements.
        """
        return Dataset(self._node, self._options.merged(options))

    def __repr__(self) -> str:
        return f"<Dataset {describe(self._node)}, cardinality {self._node.cardinality}>"

    __str__ = __repr__
