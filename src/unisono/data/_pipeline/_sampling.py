"""Random numbers as elements, and data sets whose elements are chosen by others."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono.data._pipeline import _cardinality, _structure
from unisono.data._pipeline._cardinality import INFINITE, UNKNOWN
from unisono.data._pipeline._plan import Counting, Indexed, Node, Pass, StateIterator
from unisono.data._pipeline._structure import Element, TensorSpec

_CHUNK = 1024


@dataclasses.dataclass(frozen=True, eq=False)
class Random(Counting, Indexed):
    """Random whole numbers from 0 to 2**32 - 1, for ever.

    Args:
        seed: Decides them.
        reshuffle: Whether each iteration and repetition has its own.
        seeded: Whether the user gave the seed; otherwise a distribution may replace it by a common one.
    """

    seed: int
    reshuffle: bool
    seeded: bool

    @property
    def cardinality(self) -> int:
        return INFINITE

    @property
    def spec(self) -> Element:
        return TensorSpec((), np.int64)

    @property
    def varies(self) -> bool:
        return self.reshuffle

    def rows(self, run: Pass, positions: np.ndarray) -> list[Element]:
        return list(self.stacked(run, positions))

    def stacked(self, run: Pass, positions: np.ndarray) -> Element:
        entropy = (self.seed, run.draws.get(self, 0), *run.path) if self.reshuffle else (self.seed,)
        if len(positions) == 1:
            chunk, place = divmod(int(positions[0]), _CHUNK)
            return _numbers((*entropy, chunk))[place : place + 1]
        chunks = positions // _CHUNK
        result = np.empty(positions.shape, np.int64)
        for chunk in np.unique(chunks).tolist():
            inside = chunks == chunk
            result[inside] = _numbers((*entropy, chunk))[positions[inside] - chunk * _CHUNK]
        return result


@functools.lru_cache(maxsize=64)
def _numbers(entropy: tuple[int, ...]) -> np.ndarray:
    # Raw bits are the same in all versions of numpy (NEP 19).
    bits = np.random.PCG64(np.random.SeedSequence(list(entropy))).random_raw(_CHUNK)
    numbers: np.ndarray = (bits >> np.uint64(32)).astype(np.int64)
    numbers.flags.writeable = False
    return numbers


def chooser(weights: Sequence[float] | None, count: int) -> Callable[[Any], np.int64]:
    """Returns the function from a random number to the number of a data set.

    Args:
        weights: How often each is chosen; None for equally often.
        count: How many there are.

    Raises:
        InvalidArgumentError: There is not one weight for each, or one is negative, or all are 0.

    >>> int(chooser([0.25, 0.75], 2)(2**31))
    1
    """
    given = np.ones(count) if weights is None else np.asarray(weights, float)
    if given.shape != (count,) or not (given >= 0).all() or not given.sum() > 0:
        raise InvalidArgumentError(
            "There must be one weight for each data set, 0 or more, and not all 0. "
            f"Received: weights={weights} for {count} data sets. Write weights=[0.5, 0.5]."
        )
    points = (np.cumsum(given / given.sum()) * 2.0**32).tolist()
    last = int(np.flatnonzero(given)[-1])
    return lambda number: np.int64(min(bisect.bisect_right(points, int(number)), last))


@dataclasses.dataclass(frozen=True, eq=False)
class Directed(Node):
    """Elements of several data sets, in the order that another one gives.

    Args:
        choices: Gives the number of a data set for each element.
        parents: The data sets.
        stop_on_empty: Whether the first that has no element left ends it all; otherwise it is passed over.
        used: Which of them are chosen at all: when these have ended, all is over.
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
        return _DirectedIterator(self, run)


class _DirectedIterator(StateIterator):
    def __init__(self, node: Directed, run: Pass) -> None:
        super().__init__()
        self._node = node
        self._choices = node.choices.iterate(run)
        self._sources = [parent.iterate(run) for parent in node.parents]
        self._live = list(node.used)
        #: The first element of each data set; all must have one structure.
        self._firsts: dict[int, Element] = {}

    def __next__(self) -> Element:
        while any(self._live):
            number = self._chosen(next(self._choices))
            if not self._live[number]:
                continue
            try:
                return self._checked(number, next(self._sources[number]))
            except StopIteration:
                self._live = [] if self._node.stop_on_empty else self._live
                if self._live:
                    self._live[number] = False
        raise StopIteration

    def _chosen(self, choice: Any) -> int:
        number = np.asarray(choice)
        if number.shape or number.dtype.kind not in "iu" or not 0 <= number < len(self._sources):
            raise InvalidArgumentError(
                "A choice must be the number of a data set. "
                f"Received: {choice!r:.100} for {len(self._sources)} data sets. Count them from 0."
            )
        return int(number)

    def _checked(self, number: int, element: Element) -> Element:
        if number not in self._firsts:
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


@dataclasses.dataclass(frozen=True, eq=False)
class Resample(Counting):
    """Pairs of class and element, of which some are left out so that the classes are distributed as wanted.

    Args:
        parent: Where the elements come from.
        class_of: Gives the class of an element, from 0.
        target: How often each class is wanted.
        initial: How often each is in the data; None to count.
        seed: Decides what is left out.
        seeded: Whether the user gave the seed.
    """

    parent: Node
    class_of: Callable[[Element], int]
    target: tuple[float, ...]
    initial: tuple[float, ...] | None
    seed: int
    seeded: bool

    @property
    def cardinality(self) -> int:
        return 0 if self.parent.cardinality == 0 else UNKNOWN

    @property
    def spec(self) -> Element:
        return TensorSpec((), np.int64), self.parent.spec

    @property
    def varies(self) -> bool:
        return True

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        entropy = (self.seed, run.draws.get(self, 0), *run.path)
        return _ResampleIterator(self, self.parent.iterate(run), entropy)


class _ResampleIterator(StateIterator):
    def __init__(self, node: Resample, parent: grain.DatasetIterator, entropy: tuple[int, ...]) -> None:
        super().__init__(parent)
        self._node = node
        self._source = parent
        self._entropy = entropy
        self._index = 0
        # Every class counts as seen once, so that no share is 0.
        self._seen = [1] * len(node.target)

    def __next__(self) -> Element:
        while True:
            element = next(self._source)
            chunk, place = divmod(self._index, _CHUNK)
            self._index += 1
            kind = self._node.class_of(element)
            if not 0 <= kind < len(self._seen):
                raise InvalidArgumentError(
                    "class_func must give the number of a class. "
                    f"Received: {kind} for {len(self._seen)} classes. Give target_dist a share for each."
                )
            self._seen[kind] += 1
            if _numbers((*self._entropy, chunk))[place] < self._share(kind) * 2.0**32:
                return np.int64(kind), element

    def _share(self, kind: int) -> float:
        """Which part of the elements of a class is kept; all of the one that is needed most."""
        initial = self._node.initial or self._seen
        needed = [t / i if i else 0.0 for t, i in zip(self._node.target, initial, strict=True)]
        return needed[kind] / max(needed)

    def get_state(self) -> dict[str, Any]:
        return {"parent": self._source.get_state(), "index": self._index, "seen": list(self._seen)}

    def set_state(self, state: dict[str, Any]) -> None:
        self._source.set_state(state["parent"])
        self._index, self._seen = state["index"], list(state["seen"])


def distribution(value: Any, name: str) -> tuple[float, ...]:
    """Returns shares that add up to 1.

    Args:
        value: From the user.
        name: Of the argument.

    Raises:
        InvalidArgumentError: They are not numbers of 0 or more, of which one is larger.
    """
    shares = np.asarray(value, float)
    if shares.ndim != 1 or not (shares >= 0).all() or not shares.sum() > 0:
        raise InvalidArgumentError(
            f"{name} must be the share of each class, 0 or more. Received: {name}={value!r:.200}. "
            f"Write {name}=[0.5, 0.5]."
        )
    return tuple((shares / shares.sum()).tolist())
