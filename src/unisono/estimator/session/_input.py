"""The elements of an `input_fn`: features and labels, one for a replica.

It may make iterators of TensorFlow 1. In a graph the tensors of `get_next`, and what is computed of them,
have new values in each step. Here the input_fn gets the first element. Where it returns parts of that
element as they are, parts of the further ones are put in the same places. Where it computes with them, it
is run again for each step, and finds the iterators of its first run.

Tests: tests/virtual/estimator/test_model_fn.py, tests/unit/estimator/test_graph_iterators.py.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax

from unisono._errors import InvalidArgumentError, OutOfRangeError
from unisono._system._blocks import set_for_block
from unisono._types import PyTree
from unisono.data._dataset import Dataset
from unisono.data._distribute import DistributedDataset
from unisono.data._sharding import InputContext
from unisono.estimator.session._model_step import argument_names
from unisono.spi import batches_of

if TYPE_CHECKING:
    from unisono.collectives._process_group import ProcessGroup


class IteratorInitializer:
    """Begins a pass of an iterator; nothing waits for it, as the first `get_next` does the same."""


class GraphIterator:
    """An iterator of TensorFlow 1 over a dataset.

    >>> from unisono.data import Dataset
    >>> iterator = GraphIterator(Dataset.range(2))
    >>> int(iterator.get_next()), int(iterator.get_next())
    (0, 1)
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._elements: Iterator[PyTree] | None = None
        #: For `session.run` and collections of initializers.
        self.initializer = IteratorInitializer()

    @property
    def element_spec(self) -> PyTree:
        """The shapes and types of an element."""
        return self._dataset.element_spec

    def get_next(self, name: str | None = None) -> PyTree:
        """Return the next element."""
        if self._elements is None:
            self._elements = iter(self._dataset)
        for element in self._elements:
            if (run := _RUN.get()) is not None:
                run.note(self, element)
            return element
        raise OutOfRangeError("`get_next` needs a further element. Received: a call at the end of the data.")


class InputRun:
    """The runs of an input_fn that makes iterators of TensorFlow 1."""

    def __init__(self, input_fn: Callable[[], Any]) -> None:
        self._input_fn = input_fn
        self._iterators: list[GraphIterator] = []
        #: How many iterators this run has asked for.
        self._asked = 0
        #: Results of `get_next` in this run.
        self._taken: list[tuple[GraphIterator, PyTree]] = []

    def iterator(self, dataset: Dataset) -> GraphIterator:
        """Return the iterator that a run asks for: a later run finds the first one's iterators."""
        if self._asked == len(self._iterators):
            self._iterators.append(GraphIterator(dataset))
        self._asked += 1
        return self._iterators[self._asked - 1]

    def note(self, iterator: GraphIterator, element: PyTree) -> None:
        """Remember what `get_next` has returned."""
        self._taken.append((iterator, element))

    def first(self) -> tuple[Any, Iterator[PyTree] | None]:
        """Run the input_fn; return its result, and the elements of all steps where it read iterators."""
        try:
            result = self._again()
        except OutOfRangeError:
            if not self._iterators:
                raise
            return (), iter(())
        if not self._taken or isinstance(result, (Dataset, DistributedDataset, Iterator)):
            return result, None
        return result, self._elements(result)

    def _again(self) -> Any:
        self._asked, self._taken = 0, []
        with set_for_block(_RUN, self):
            return self._input_fn()

    def _elements(self, result: PyTree) -> Iterator[PyTree]:
        # Kept while they are compared by identity.
        taken, places = self._taken, _places(result, self._taken)
        yield result
        structure = jax.tree.structure(result)
        with contextlib.suppress(OutOfRangeError):
            while True:
                if places is None:
                    yield self._again()
                    continue
                leaves = jax.tree.leaves([iterator.get_next() for iterator, _ in taken])
                yield jax.tree.unflatten(structure, [leaves[place] for place in places])


_RUN: ContextVar[InputRun | None] = ContextVar("unisono_input_run", default=None)


def current_input_run() -> InputRun | None:
    """Return the run of an input_fn that the running code is part of; None outside of every one."""
    return _RUN.get()


def _places(result: PyTree, taken: list[tuple[GraphIterator, PyTree]]) -> list[int] | None:
    """Return which parts of the elements a result is made of; None where others are among them."""
    known = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves([element for _, element in taken]))}
    places = [known.get(id(leaf)) for leaf in jax.tree.leaves(result)]
    return None if None in places else [place for place in places if place is not None]


def make_one_shot_iterator(dataset: Dataset, shared_name: object = None) -> GraphIterator:
    """Return an iterator whose `get_next` an input_fn may return, as programs of TensorFlow 1 do.

    >>> from unisono.data import Dataset
    >>> int(make_one_shot_iterator(Dataset.range(2)).get_next())
    0
    """
    run = _RUN.get()
    return GraphIterator(dataset) if run is None else run.iterator(dataset)


class InputFunction:
    """An input_fn with the arguments that it takes of some; it is pickled where workers make their data."""

    def __init__(self, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
        known = argument_names(function)
        self._function, self._takes_context = function, "input_context" in known
        self._given = {name: value for name, value in given.items() if name in known}

    def __repr__(self) -> str:
        return repr(self._function)

    def __call__(self, context: InputContext, group: ProcessGroup | None = None) -> Iterator[PyTree]:
        """Yield pairs of features and labels.

        Raises:
            InvalidArgumentError: the input_fn returns nothing that holds data, or that can be divided.
        """
        given = self._given | ({"input_context": context} if self._takes_context else {})
        result, of_iterators = InputRun(lambda: self._function(**given)).first()
        if group is not None and not isinstance(result, Dataset):
            raise InvalidArgumentError(
                "auto_shard_dataset=True needs an input_fn that returns a `tf.data.Dataset`. Received: "
                f"{type(result).__name__}. Return the dataset itself, or take this worker's part by "
                "`input_context`, with auto_shard_dataset=False."
            )
        for element in _elements(result, group) if of_iterators is None else of_iterators:
            yield _parsed(element)


def _elements(result: object, group: ProcessGroup | None) -> Iterator[PyTree]:
    """Return the elements of an input_fn's result: of a data set, or the same arrays for ever."""
    if result is None:
        raise InvalidArgumentError(
            "An input_fn must return data. Received: None. Write `return dataset` at its end."
        )
    if isinstance(result, (dict, tuple, list)) or hasattr(result, "shape"):
        # Tensors of a graph: each step would compute them again.
        return itertools.repeat(result)
    return batches_of(result, group)


def _parsed(element: PyTree) -> tuple[PyTree, PyTree]:
    """Return features and labels of an element."""
    if not isinstance(element, (tuple, list)):
        return element, None
    if len(element) != 2:
        raise InvalidArgumentError(
            "input_fn should return (features, labels) as a len 2 tuple. Received: elements of "
            f"{len(element)} parts. Put several arrays into a dict of features."
        )
    return element[0], element[1]
