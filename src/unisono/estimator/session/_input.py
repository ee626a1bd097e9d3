"""What an `input_fn` gives: elements of features and labels, one for a replica.

Tests: tests/virtual/estimator/test_model_fn.py, tests/unit/estimator/test_graph_iterators.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from unisono._errors import InvalidArgumentError
from unisono._types import PyTree
from unisono.data._dataset import Dataset
from unisono.data._sharding import InputContext
from unisono.estimator.session._graph_iterators import InputRun
from unisono.estimator.session._model_step import argument_names
from unisono.spi import batches_of

if TYPE_CHECKING:
    from unisono.cluster._process_group import ProcessGroup


class InputFunction:
    """An input_fn with those of some arguments that it has; it is pickled where workers make their data."""

    def __init__(self, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
        known = argument_names(function)
        self._function, self._takes_context = function, "input_context" in known
        self._given = {name: value for name, value in given.items() if name in known}

    def __repr__(self) -> str:
        return repr(self._function)

    def __call__(self, context: InputContext, group: ProcessGroup | None = None) -> Iterator[PyTree]:
        """Yield pairs of features and labels.

        Args:
            group: the workers between which the elements are divided; None to read all of them.

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
    """Return the elements of what an input_fn returned: those of a data set, or the same arrays for ever."""
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
