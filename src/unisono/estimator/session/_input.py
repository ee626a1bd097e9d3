"""What an `input_fn` gives: elements for this process' replicas, in rows of one element for each.

Tests: tests/virtual/estimator/test_model_fn.py, tests/virtual/estimator/test_train.py.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._reads import DataSet
from unisono._types import PyTree, UserValue
from unisono.data._batches import as_array, check_values
from unisono.data._distribute import batches_of
from unisono.data._sharding import InputContext
from unisono.estimator.session._model_step import argument_names

if TYPE_CHECKING:
    from unisono.strategies._base import Strategy

_LOG = logging.getLogger("unisono")


class Row(NamedTuple):
    """The elements that one step takes.

    Args:
        batch: pytree of host arrays, `(features, labels)`; with a leading axis of this process' replicas,
            or the rows of all of them where every replica computes all.
        is_whole: whether it has the rows of all replicas.
    """

    batch: PyTree
    is_whole: bool

    def fits(self, other: Row) -> bool:
        """Return whether another row has the same form.

        Args:
            other: of the same data.
        """
        if self.is_whole or other.is_whole:
            return False
        own, others = jax.tree.leaves(self.batch), jax.tree.leaves(other.batch)
        structure: Hashable = jax.tree.structure(self.batch)
        same: Hashable = jax.tree.structure(other.batch)
        return bool(structure == same) and all(
            a.shape == b.shape and a.dtype == b.dtype for a, b in zip(own, others, strict=True)
        )


def data_of(input_fn: Callable[..., Any], strategy: Strategy, given: dict[str, Any]) -> Iterator[PyTree]:
    """Return the elements of an input_fn: pairs of features and labels.

    Args:
        input_fn: the user's.
        strategy: whose replicas take the elements.
        given: further arguments by name, which the input_fn gets if it has them.

    Raises:
        InvalidArgumentError: it returns nothing that holds data.
    """
    group = strategy.process_group
    context = InputContext(group.size, group.index, strategy.num_replicas_in_sync)
    every = {**given, "input_context": context}
    known = argument_names(input_fn)
    result = input_fn(**{name: value for name, value in every.items() if name in known})
    for element in _elements(result):
        yield _parsed(element)


def _elements(result: UserValue) -> Iterator[PyTree]:
    """Return the elements of what an input_fn returned: those of a data set, or the same arrays for ever."""
    if result is None:
        raise InvalidArgumentError(
            "An input_fn must return data. Received: None. Write `return dataset` at its end."
        )
    if isinstance(result, (DataSet, Iterator)) or hasattr(result, "as_numpy_iterator"):
        return batches_of(result)
    if isinstance(result, (dict, tuple, list)) or hasattr(result, "shape"):
        # Tensors of a graph: each step would compute them again.
        return itertools.repeat(result)
    return batches_of(result)


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


def rows_of(elements: Iterator[PyTree], replicas: int) -> Iterator[Row]:
    """Yield rows of elements, one for each replica of this process.

    The last row may have fewer elements, or elements of fewer rows: these are joined, and every replica
    computes all of them, as one device would.

    Args:
        elements: pairs of features and labels.
        replicas: of this process.
    """
    while taken := list(itertools.islice(elements, replicas)):
        arrays = [jax.tree.map(lambda leaf: np.asarray(as_array(leaf)), e) for e in taken]
        for element in arrays:
            check_values(element, "(features, labels)")
        if len(arrays) == replicas and len({_form(e) for e in arrays}) == 1:
            stacked = [e[None] for e in jax.tree.leaves(arrays[0])] if replicas == 1 else None
            structure = jax.tree.structure(arrays[0])
            if stacked is None:
                stacked = [np.stack(leaves) for leaves in zip(*map(jax.tree.leaves, arrays), strict=True)]
            yield Row(jax.tree.unflatten(structure, stacked), is_whole=False)
        elif (joined := _joined(arrays)) is not None:
            yield Row(joined, is_whole=True)
        else:
            _LOG.warning(
                "The last %d element(s) of the input_fn are left out: they have no rows that %d replicas "
                "could share. Give a number of elements that divides by %d, or batch them.",
                len(arrays), replicas, replicas,
            )  # fmt: skip


def _form(element: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(element)
    return structure, tuple((x.shape, x.dtype) for x in leaves)


def _joined(elements: list[PyTree]) -> PyTree | None:
    """Return the rows of several elements as one; None where they have none."""
    if len(elements) == 1:
        return elements[0]
    for element in elements:
        sizes = {np.shape(x)[:1] for x in jax.tree.leaves(element)}
        if len(sizes) != 1 or () in sizes:
            return None
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *elements)
