"""Random numbers, and data sets that sample from others.

Tests: tests/unit/data/test_dataset_further.py.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._types import ArrayLike
from unisono.data._pipeline import _cardinality, _structure
from unisono.data._pipeline._cardinality import INFINITE, UNKNOWN
from unisono.data._pipeline._plan import IndexedNode, Node, Pass, SeededNode, SelectiveNode, StateIterator
from unisono.data._pipeline._structure import Element, TensorSpec

#: Random numbers that are computed together: 8 KiB. Their seed includes the chunk's number, for random
#: access.
_CHUNK = 1024


class Random(SeededNode, IndexedNode):
    """An infinite sequence of random whole numbers from 0 to 2**32 - 1."""

    @property
    def cardinality(self) -> int:
        return INFINITE

    @property
    def spec(self) -> Element:
        return TensorSpec((), np.int64)

    def rows(self, run: Pass, positions: np.ndarray) -> list[Element]:
        return list(self.stacked(run, positions))

    def stacked(self, run: Pass, positions: np.ndarray) -> Element:
        entropy = self.entropy(run)
        # The usual case, element by element, needs only a slice of the cached chunk.
        if len(positions) == 1:
            chunk, place = divmod(int(positions[0]), _CHUNK)
            return _numbers((*entropy, chunk))[place : place + 1]
        chunks = positions // _CHUNK
        result = np.empty(positions.shape, np.int64)
        for chunk in np.unique(chunks).tolist():
            inside = chunks == chunk
            result[inside] = _numbers((*entropy, chunk))[positions[inside] - chunk * _CHUNK]
        return result


# 512 KiB for all sequences of the process.
@functools.lru_cache(maxsize=64)
def _numbers(entropy: tuple[int, ...]) -> np.ndarray:
    # NumPy guarantees the raw bits in all versions (NEP 19).
    bits = np.random.PCG64(np.random.SeedSequence(list(entropy))).random_raw(_CHUNK)
    numbers: np.ndarray = (bits >> np.uint64(32)).astype(np.int64)
    # All callers share the cached array.
    numbers.flags.writeable = False
    return numbers


def chooser(weights: Sequence[float] | None, count: int) -> Callable[[Any], np.int64]:
    """Return the function from a random number to the number of a data set.

    >>> int(chooser([0.25, 0.75], 2)(2**31))
    1
    """
    given = np.ones(count) if weights is None else np.asarray(weights, float)
    if given.shape != (count,) or not (given >= 0).all() or not given.sum() > 0:
        raise InvalidArgumentError(
            "The weights must be one number for each data set, 0 or more, and not all 0. "
            f"Received: weights={weights} for {count} data sets. Write weights=[0.5, 0.5]."
        )
    points = (np.cumsum(given / given.sum()) * 2.0**32).tolist()
    # Rounding may leave the last point below 2**32, and a data set of weight 0 must not be chosen there.
    last = int(np.flatnonzero(given)[-1])
    return lambda number: np.int64(min(bisect.bisect_right(points, int(number)), last))


class Selection(Node, label="Directed"):
    """Elements of several data sets, in an order that another data set decides.

    Args:
        choices: Yields the number of a data set for each element.
        stop_on_empty: Whether the end of the first data set ends the sequence; otherwise it is skipped.
        used: Whether each data set can be chosen: the sequence ends when all of these have ended.
    """

    choices: Node
    parents: tuple[Node, ...]
    stop_on_empty: bool
    used: tuple[bool, ...]

    @property
    def cardinality(self) -> int:
        sizes = [parent.cardinality for parent in self.parents]
        if not self.stop_on_empty and self.choices.cardinality == INFINITE and UNKNOWN not in sizes:
            return _cardinality.summed(size for size, used in zip(sizes, self.used, strict=True) if used)
        return UNKNOWN

    @property
    def spec(self) -> Element:
        return self.parents[0].spec

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        return _SelectionIterator(self, run)


class _SelectionIterator(StateIterator):
    def __init__(self, node: Selection, run: Pass) -> None:
        super().__init__()
        self._node = node
        self._choices = node.choices.iterate(run)
        self._sources = [parent.iterate(run) for parent in node.parents]
        # A data set of weight 0 does not count as live: it is never read, so its end would never be seen.
        self._live = list(node.used)
        #: The first element of each data set, to check that their structures are equal.
        self._firsts: dict[int, Element] = {}

    def __next__(self) -> Element:
        while any(self._live):
            number = self._chosen(next(self._choices))
            if not self._live[number]:
                continue
            try:
                return self._checked(number, next(self._sources[number]))
            except StopIteration:
                # The empty list also ends every further `next`.
                self._live = [] if self._node.stop_on_empty else self._live
                if self._live:
                    self._live[number] = False
        raise StopIteration

    def _chosen(self, choice: Element) -> int:
        number = np.asarray(choice)
        if number.shape or number.dtype.kind not in "iu" or not 0 <= number < len(self._sources):
            raise InvalidArgumentError(
                "A choice must be the number of a data set, from 0. "
                f"Received: {choice!r:.100} for {len(self._sources)} data sets. "
                f"Write numbers from 0 to {len(self._sources) - 1}."
            )
        return int(number)

    def _checked(self, number: int, element: Element) -> Element:
        if number not in self._firsts:
            # Only the first element of each: to compare the structure of every one would cost each `next`.
            self._firsts[number] = element
            _structure.combine(lambda parts, path: None, list(self._firsts.values()))
        return element

    def get_state(self) -> dict[str, Any]:
        return {
            "choices": self._choices.get_state(),
            "sources": [source.get_state() for source in self._sources],
            "live": list(self._live),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._choices.set_state(state["choices"])
        for source, own in zip(self._sources, state["sources"], strict=True):
            source.set_state(own)
        self._live = list(state["live"])

    def close(self) -> None:
        super().close()
        for iterator in (self._choices, *self._sources):
            iterator.close()


class Resample(SeededNode, SelectiveNode):
    """Pairs of class and element, of which some are dropped so that classes have the wanted distribution.

    Args:
        initial: The share of each class in the data; None counts them.
    """

    class_of: Callable[[Element], int]
    target: tuple[float, ...]
    initial: tuple[float, ...] | None

    @property
    def spec(self) -> Element:
        return TensorSpec((), np.int64), self.parent.spec

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        return _ResampleIterator(self, self.parent.iterate(run), self.entropy(run))


class _ResampleIterator(StateIterator):
    def __init__(self, node: Resample, parent: grain.DatasetIterator, entropy: tuple[int, ...]) -> None:
        super().__init__(parent)
        self._node = node
        self._source = parent
        self._entropy = entropy
        self._index = 0
        # Start at 1, so that no share is 0: a class that has not been seen would be divided by it.
        self._seen = [1] * len(node.target)

    def __next__(self) -> Element:
        while True:
            element = next(self._source)
            # The number of the element finds its random number, so that the state holds no generator.
            chunk, place = divmod(self._index, _CHUNK)
            self._index += 1
            kind = self._node.class_of(element)
            if not 0 <= kind < len(self._seen):
                raise InvalidArgumentError(
                    "class_func must return the number of a class. "
                    f"Received: {kind} for {len(self._seen)} classes. Write a share for each in target_dist."
                )
            self._seen[kind] += 1
            if _numbers((*self._entropy, chunk))[place] < self._share(kind) * 2.0**32:
                return np.int64(kind), element

    def _share(self, kind: int) -> float:
        """Return the share of a class' elements to keep: all of the class that is most needed."""
        initial = self._node.initial or self._seen
        # A class that the data lack cannot be sampled, whatever share is wanted.
        needed = [t / i if i else 0.0 for t, i in zip(self._node.target, initial, strict=True)]
        return needed[kind] / max(needed)

    def get_state(self) -> dict[str, Any]:
        return {"parent": self._source.get_state(), "index": self._index, "seen": list(self._seen)}

    def set_state(self, state: dict[str, Any]) -> None:
        self._source.set_state(state["parent"])
        self._index, self._seen = state["index"], list(state["seen"])


def distribution(value: ArrayLike, name: str) -> tuple[float, ...]:
    """Return shares, scaled so that they add up to 1."""
    shares = np.asarray(value, float)
    if shares.ndim != 1 or not (shares >= 0).all() or not shares.sum() > 0:
        raise InvalidArgumentError(
            f"{name} must be the share of each class, 0 or more. Received: {name}={value!r:.200}. "
            f"Write {name}=[0.5, 0.5]."
        )
    return tuple((shares / shares.sum()).tolist())
