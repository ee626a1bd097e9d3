"""The plan of a pipeline: a tree of nodes, and one pass over it.

A node is a frozen record of a source or a transformation; the data set that the user holds is the last one.
There are two families. An `Indexed` node finds any of its elements by position, so a whole chain of them
needs no state but a position, and batches are gathered at once. A `Stream` node gives its elements one after
the other.

How often a data set was iterated changes the order of its shuffles. That is all that a node remembers; a
`Pass` takes those numbers when an iteration begins, and an iterator's state records them.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import grain
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._reads import DataIterator, current_reader, note_iteration
from unisono.data._pipeline import _order
from unisono.data._pipeline._cardinality import INFINITE
from unisono.data._pipeline._structure import Element, spec_of, stack

# What a node that remembers passes gives to each: a number, or for a cache the numbers its contents were
# made with.
Draw = Any

# Orders of repetitions that a pass keeps at once are limited by their total size.
_POSITIONS_KEPT = 2**20
LONG = 2**27
_CHUNKS_KEPT = 64


class Counter:
    """Counts the passes begun over one node."""

    def __init__(self) -> None:
        self.value = 0


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass over a pipeline: which iteration of each shuffle it is, inside which repetitions.

    Args:
        draws: For each node that remembers passes, what it drew for this one.
        path: Numbers of the repetitions around, outermost first.
        orders: Shuffled orders in use, filled on demand and shared by the repetitions.
        lock: Guards `orders`.
    """

    draws: Mapping[Node, Draw]
    path: tuple[int, ...] = ()
    orders: dict[Node, dict[tuple[int, ...], _order.ShuffledOrder]] = dataclasses.field(default_factory=dict)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def at(self, repetition: int) -> Pass:
        """Returns this pass inside a repetition."""
        return dataclasses.replace(self, path=(*self.path, repetition))

    def order(
        self, node: Node, size: int, buffer_size: int, entropy: tuple[int, ...]
    ) -> _order.ShuffledOrder:
        """Returns the order of a shuffle in this pass.

        Args:
            node: The shuffle.
            size: Cardinality of what it shuffles.
            buffer_size: Size of its buffer.
            entropy: Numbers that decide the order.

        Returns:
            The order, made once.
        """
        # Several reader threads may ask at once.
        with self.lock:
            kept = self.orders.setdefault(node, {})
            if entropy not in kept:
                while len(kept) >= max(2, min(16, _POSITIONS_KEPT // max(1, size))):
                    del kept[next(iter(kept))]
                # A long order keeps a window of itself, so that memory stays bounded.
                keep = _CHUNKS_KEPT if size == INFINITE or size > LONG else None
                length = None if size == INFINITE else size
                kept[entropy] = _order.ShuffledOrder(length, buffer_size, entropy, keep)
            return kept[entropy]


@dataclasses.dataclass(frozen=True, eq=False)
class Node(abc.ABC):
    """A source or a transformation. Fields that hold nodes, or tuples of nodes, are its inputs."""

    @functools.cached_property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes that this one reads."""
        found: list[Node] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            found.extend(
                part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, Node)
            )
        return tuple(found)

    def with_inputs(self, inputs: Mapping[Node, Node]) -> Self:
        """Returns this node with other inputs.

        Args:
            inputs: The new one for each old one.

        Returns:
            A new node.
        """
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Node):
                changes[field.name] = inputs[value]
            elif isinstance(value, tuple) and any(isinstance(part, Node) for part in value):
                changes[field.name] = tuple(inputs[part] for part in value)
        return dataclasses.replace(self, **changes)

    @property
    @abc.abstractmethod
    def cardinality(self) -> int:
        """Number of elements, INFINITE or UNKNOWN."""

    @functools.cached_property
    def spec(self) -> Element:
        """Spec of the elements; found by making the first one where nothing else tells it."""
        return first_spec(self)

    @abc.abstractmethod
    def iterate(self, run: Pass) -> grain.DatasetIterator:
        """Returns an iterator over one pass, whose state can be saved and restored; reads nothing yet."""

    @property
    def varies(self) -> bool:
        """Whether another repetition may give another order."""
        return any(node.varies for node in self.inputs)


class Remembering(Node):
    """A node that remembers how often it was iterated."""

    @abc.abstractmethod
    def peek(self) -> Draw:
        """Returns what the next pass will draw, without beginning it."""

    @abc.abstractmethod
    def begin(self) -> Draw:
        """Begins a pass and returns what it draws, as JSON."""

    @abc.abstractmethod
    def resume(self, draw: Draw) -> None:
        """Goes on as if the last pass had drawn `draw`."""

    @property
    def inner(self) -> bool:
        """Whether the nodes below take part in passes themselves."""
        return True


@dataclasses.dataclass(frozen=True, eq=False)
class Counting(Remembering):
    """A node that numbers its passes."""

    counter: Counter = dataclasses.field(default_factory=Counter, kw_only=True)

    def peek(self) -> Draw:
        return self.counter.value

    def begin(self) -> Draw:
        self.counter.value += 1
        return self.counter.value - 1

    def resume(self, draw: Draw) -> None:
        self.counter.value = draw + 1


@dataclasses.dataclass(frozen=True, eq=False)
class Indexed(Node):
    """A node whose elements can be made in any order, by position."""

    @abc.abstractmethod
    def rows(self, run: Pass, positions: np.ndarray) -> list[Element]:
        """Returns the elements at `positions` (an int64 vector, not empty)."""

    def stacked(self, run: Pass, positions: np.ndarray) -> Element:
        """Returns the elements at `positions` as one batch."""
        return stack(self.rows(run, positions))

    @property
    def threads(self) -> int:
        """Threads that this node asks to be made by; 0 for none."""
        return 0

    @property
    def ahead(self) -> int:
        """Elements that this node asks to be made ahead."""
        return 0

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        nodes = list(walk(self))
        threads = max(node.threads for node in nodes if isinstance(node, Indexed))
        ahead = sum(node.ahead for node in nodes if isinstance(node, Indexed))
        if not threads and not ahead:
            return _DirectIterator(self, run)
        options = grain.ReadOptions(num_threads=max(threads, 1), prefetch_buffer_size=max(threads, ahead))
        return iter(_OnePass(self, run).to_iter_dataset(options))


class StateIterator(grain.DatasetIterator):
    """An iterator whose state can be saved and restored."""

    @abc.abstractmethod
    def __next__(self) -> Element: ...

    @abc.abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Returns the state, which `json` can write."""

    @abc.abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on where the iterator that gave `state` stood."""


class _DirectIterator(StateIterator):
    """Makes one element after the other; Grain's reader takes four times as long for small ones."""

    def __init__(self, node: Indexed, run: Pass) -> None:
        super().__init__()
        self._node = node
        self._run = run
        self._next = 0

    def __next__(self) -> Element:
        if self._next == self._node.cardinality:
            raise StopIteration
        element = self._node.rows(self._run, np.array([self._next]))[0]
        self._next += 1
        return element

    def get_state(self) -> dict[str, Any]:
        return {"next_index": self._next}

    def set_state(self, state: dict[str, Any]) -> None:
        self._next = state["next_index"]


class _OnePass(grain.MapDataset):
    """One pass over an indexed node, as Grain sees it."""

    def __init__(self, node: Indexed, run: Pass) -> None:
        super().__init__()
        self._node = node
        self._run = run

    def __len__(self) -> int:
        return sys.maxsize if self._node.cardinality == INFINITE else self._node.cardinality

    def __getitem__(self, index: int) -> Element:
        return self._node.rows(self._run, np.array([index]))[0]

    def __str__(self) -> str:
        return describe(self._node)


class Stream(grain.IterDataset):
    """One pass over any node, as an input of Grain's transformations."""

    def __init__(self, node: Node, run: Pass) -> None:
        super().__init__()
        self._node = node
        self._run = run

    def __iter__(self) -> grain.DatasetIterator:
        return self._node.iterate(self._run)

    def __str__(self) -> str:
        return describe(self._node)


def walk(node: Node) -> Iterator[Node]:
    """Yields the node and all below it; one that is used twice comes twice."""
    yield node
    for below in node.inputs:
        yield from walk(below)


def remembering(node: Node) -> list[Remembering]:
    """Returns the nodes that remember passes, each once, in an order that depends on the plan alone."""
    found: dict[Remembering, None] = {}
    _find_remembering(node, found)
    return list(found)


def _find_remembering(node: Node, found: dict[Remembering, None]) -> None:
    if isinstance(node, Remembering):
        found[node] = None
        if not node.inner:
            return
    for below in node.inputs:
        _find_remembering(below, found)


def first_spec(node: Node) -> Element:
    """Returns the spec of the first element, which is made for it; no pass is begun.

    Args:
        node: A node whose elements a Python function makes.

    Returns:
        The structure of `TensorSpec`.

    Raises:
        InvalidArgumentError: There is no element.
    """
    iterator = node.iterate(Pass({below: below.peek() for below in remembering(node)}))
    try:
        return spec_of(next(iterator))
    except StopIteration:
        raise InvalidArgumentError(
            "A data set must have an element for its spec to be found, where a Python function makes them. "
            f"Received: an empty data set, {describe(node)}. Give from_generator an output_signature."
        ) from None
    finally:
        iterator.close()


def describe(node: Node) -> str:
    """Returns the names of the nodes, as in `Shuffle(Slices)`."""
    below = ", ".join(describe(part) for part in node.inputs)
    return f"{type(node).__name__}({below})" if below else type(node).__name__


class PipelineIterator(StateIterator, DataIterator):
    """Iterates once over a pipeline; its state is small, plain JSON.

    Args:
        node: Last node of the pipeline.
    """

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node
        self._start([remembered.begin() for remembered in remembering(node)])

    def _start(self, draws: Sequence[Draw]) -> None:
        self._draws = list(draws)
        self._inner = self._node.iterate(Pass(dict(zip(remembering(self._node), draws, strict=True))))

    def __iter__(self) -> PipelineIterator:
        note_iteration(self)
        return self

    def __next__(self) -> Element:
        reader = current_reader()
        return next(self._inner) if reader is None else reader.read(self, lambda: next(self._inner))

    def get_state(self) -> dict[str, Any]:
        """Returns the state: where the iteration is, and which pass it belongs to.

        Returns:
            A dict that `json` can write.
        """
        return {"pipeline": describe(self._node), "passes": self._draws, "position": self._inner.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on where the iterator that gave `state` stood; the next iteration will be the one after its.

        Args:
            state: From `get_state` of an iterator over the same pipeline, in this process or another.

        Raises:
            InvalidArgumentError: The state comes from another pipeline.
        """
        if state.get("pipeline") != describe(self._node):
            raise InvalidArgumentError(
                "A state must come from the same pipeline. "
                f"Received: the state of {state.get('pipeline')} for {describe(self._node)}. "
                "Build the data set with the same calls in the same order."
            )
        for remembered, draw in zip(remembering(self._node), state["passes"], strict=True):
            remembered.resume(draw)
        self._inner.close()
        self._start(state["passes"])
        self._inner.set_state(state["position"])

    def start_prefetch(self) -> None:
        """Starts to read ahead, where the pipeline does so, before the first element is asked for."""
        self._inner.start_prefetch()

    def close(self) -> None:
        """Ends the iteration and its threads."""
        super().close()
        self._inner.close()

    def __str__(self) -> str:
        return f"PipelineIterator({describe(self._node)})"
