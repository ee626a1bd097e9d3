"""The plan of a pipeline: a tree of nodes, and one pass over it.

A node is a frozen record of a source or a transformation; a user's data set holds the last one. There are two
families. An `IndexedNode` finds any of its elements by position: the state of a whole chain of them is one
position, and a batch is gathered by one NumPy operation. A stream node yields its elements in sequence.

The number of earlier iterations decides the order of a shuffle. Nodes hold no other state. A `Pass` takes
these numbers when an iteration starts, and the state of an iterator records them.

Tests: tests/unit/data/test_dataset_state.py, tests/unit/data/test_dataset_shuffle.py.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, dataclass_transform

import grain
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._reads import DataIterator, current_reader, note_iteration
from unisono.data._pipeline import _order
from unisono.data._pipeline._cardinality import INFINITE, UNKNOWN
from unisono.data._pipeline._structure import Element, spec_of, stack

#: The number of a pass over a node, or for a cache the numbers of the passes that filled it.
Draw = Any

#: The most positions in the orders that a pass keeps for different repetitions: 8 MiB of int64.
_POSITIONS_KEPT = 2**20
#: A longer order is kept in part only: whole, it would take more than 1 GiB.
LONG = 2**27
#: The part of a long order that is kept, in chunks of 8,192 positions: 4 MiB.
_CHUNKS_KEPT = 64


class Counter:
    """Counts the passes over a node."""

    def __init__(self) -> None:
        self.value = 0


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass over a pipeline: the number of the iteration of each shuffle, and of the repetitions around.

    Args:
        draws: For each stateful node, the number of this pass.
        path: Numbers of the repetitions around, outermost first.
        orders: Shuffled orders in use, filled on demand and shared by the repetitions.
    """

    draws: Mapping[Node, Draw]
    path: tuple[int, ...] = ()
    orders: dict[Node, dict[tuple[int, ...], _order.ShuffledOrder]] = dataclasses.field(default_factory=dict)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def at(self, repetition: int) -> Pass:
        """Return this pass inside a repetition."""
        # The copy shares `orders` and `lock`, so that the limit on kept orders holds for the whole pass.
        return dataclasses.replace(self, path=(*self.path, repetition))

    def order(
        self, node: Node, size: int, buffer_size: int, entropy: tuple[int, ...]
    ) -> _order.ShuffledOrder:
        """Return the order of a shuffle in this pass."""
        # Several reader threads may call this at the same time.
        with self.lock:
            kept = self.orders.setdefault(node, {})
            if entropy not in kept:
                # At least two: a batch or the reader threads may be at the border of two repetitions.
                while len(kept) >= max(2, min(16, _POSITIONS_KEPT // max(1, size))):
                    del kept[next(iter(kept))]
                # A long order keeps only its last chunks, so that memory stays bounded.
                keep = _CHUNKS_KEPT if size == INFINITE or size > LONG else None
                length = None if size == INFINITE else size
                kept[entropy] = _order.ShuffledOrder(length, buffer_size, entropy, keep)
            return kept[entropy]


# `eq=False` in all nodes: passes and orders are keyed by the node itself. Two shuffles with equal fields
# count their passes separately, and fields that are arrays cannot be compared with `==`.
@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(dataclasses.field,))
@dataclasses.dataclass(frozen=True, eq=False)
class Node(abc.ABC):
    """A source or a transformation. Its inputs are the fields that hold nodes or tuples of nodes.

    Each subclass is such a dataclass, too; `label` is its name in `describe`.
    """

    #: Saved states hold it: it stays when the class gets another name.
    label: ClassVar[str]

    def __init_subclass__(cls, label: str = "") -> None:
        dataclasses.dataclass(frozen=True, eq=False)(cls)
        cls.label = label or cls.__name__

    @functools.cached_property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes that this one reads."""
        nodes: list[Node] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            nodes.extend(
                part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, Node)
            )
        return tuple(nodes)

    def with_inputs(self, inputs: Mapping[Node, Node]) -> Self:
        """Return this node with other inputs."""
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
        """Spec of the elements; by default of the first one, which is computed for it."""
        return first_spec(self)

    @abc.abstractmethod
    def iterate(self, run: Pass) -> grain.DatasetIterator:
        """Return an iterator over one pass, whose state can be saved and restored. Nothing is read yet."""

    @property
    def varies(self) -> bool:
        """True if another repetition may give another order."""
        return any(node.varies for node in self.inputs)


class UnaryNode(Node):
    """A node with one input, whose cardinality and spec it has unless a subclass overrides them."""

    parent: Node

    @property
    def cardinality(self) -> int:
        return self.parent.cardinality

    @property
    def spec(self) -> Element:
        return self.parent.spec


class SelectiveNode(UnaryNode):
    """A node with one input, of whose elements it makes an unknown number."""

    @property
    def cardinality(self) -> int:
        return 0 if self.parent.cardinality == 0 else UNKNOWN


class StatefulNode(Node):
    """A node that counts its iterations."""

    @abc.abstractmethod
    def peek(self) -> Draw:
        """Return the number of the next pass, without starting it."""

    @abc.abstractmethod
    def begin(self) -> Draw:
        """Start a pass and return its number, as JSON."""

    @abc.abstractmethod
    def resume(self, draw: Draw) -> None:
        """Continue as if the last pass had the number `draw`."""

    @property
    def inner(self) -> bool:
        """True if the passes of the nodes below are counted, too."""
        return True


class CountingNode(StatefulNode):
    """A node that numbers its passes."""

    # `dataclasses.replace` hands the counter on: a pipeline that is rewritten for a worker continues to count
    # the passes of the original.
    counter: Counter = dataclasses.field(default_factory=Counter, kw_only=True)

    def peek(self) -> Draw:
        return self.counter.value

    def begin(self) -> Draw:
        self.counter.value += 1
        return self.counter.value - 1

    def resume(self, draw: Draw) -> None:
        self.counter.value = draw + 1


class SeededNode(CountingNode):
    """A node whose elements or their order are random.

    Args:
        reshuffle: Whether each iteration and repetition has an order of its own.
        seeded: Whether the user passed the seed; otherwise a distribution may replace it by a common one.
    """

    seed: int
    reshuffle: bool
    seeded: bool

    @property
    def varies(self) -> bool:
        return self.reshuffle or super().varies

    def entropy(self, run: Pass) -> tuple[int, ...]:
        """Return the numbers that decide a pass."""
        # Inside a data set that a function returned no draws are recorded: there the path alone tells passes
        # apart.
        return (self.seed, run.draws.get(self, 0), *run.path) if self.reshuffle else (self.seed,)


class IndexedNode(Node):
    """A node whose elements can be computed in any order, by position."""

    @abc.abstractmethod
    def rows(self, run: Pass, positions: np.ndarray) -> list[Element]:
        """Return the elements at `positions` (an int64 vector, not empty)."""

    def stacked(self, run: Pass, positions: np.ndarray) -> Element:
        """Return the elements at `positions` as one batch."""
        return stack(self.rows(run, positions))

    @property
    def threads(self) -> int:
        """The number of threads that this node wants for computing its elements; 0 for none."""
        return 0

    @property
    def ahead(self) -> int:
        """The number of elements that this node wants to be computed ahead."""
        return 0

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        nodes = list(walk(self))
        # One reader for the whole chain: each of its threads computes an element of this node through all
        # nodes below. With a `batch` last, whole batches are computed in parallel.
        threads = max(node.threads for node in nodes if isinstance(node, IndexedNode))
        ahead = sum(node.ahead for node in nodes if isinstance(node, IndexedNode))
        if not threads and not ahead:
            # Grain's reader takes four times as long for small elements.
            return PositionIterator(self, run)
        # Grain reads ahead only with at least one thread, and never runs more threads than its buffer has
        # places: it logs a warning where the buffer is smaller.
        options = grain.ReadOptions(num_threads=max(threads, 1), prefetch_buffer_size=max(threads, ahead))
        return iter(_OnePass(self, run).to_iter_dataset(options))


class StateIterator(grain.DatasetIterator):
    """An iterator whose state can be saved and restored."""

    @abc.abstractmethod
    def __next__(self) -> Element: ...

    @abc.abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Return the state, which `json` can write."""

    @abc.abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at the position of the iterator that returned `state`."""


class SourceIterator(StateIterator):
    """Reads a source; its state is the source's with the attributes that `kept` names, without a `_`."""

    kept: ClassVar[tuple[str, ...]] = ()

    def __init__(self, source: grain.DatasetIterator) -> None:
        super().__init__(source)
        self._source = source

    def get_state(self) -> dict[str, Any]:
        return {"parent": self._source.get_state(), **{name: getattr(self, f"_{name}") for name in self.kept}}

    def set_state(self, state: dict[str, Any]) -> None:
        self._source.set_state(state["parent"])
        for name in self.kept:
            setattr(self, f"_{name}", state[name])


class PositionIterator(StateIterator):
    """Computes the elements of an indexed node in sequence; its state is the next position."""

    def __init__(self, node: IndexedNode, run: Pass) -> None:
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
    """One pass over an indexed node, as a data set of Grain."""

    def __init__(self, node: IndexedNode, run: Pass) -> None:
        super().__init__()
        self._node = node
        self._run = run

    def __len__(self) -> int:
        # Python's `len` accepts neither infinity nor a negative number.
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
    """Yield the node and all below it; a node that is used twice is yielded twice."""
    yield node
    for below in node.inputs:
        yield from walk(below)


def stateful_nodes(node: Node) -> list[StatefulNode]:
    """Return the stateful nodes of a plan, each once, in an order that depends only on the plan.

    States saved by another process rely on that order.
    """
    nodes: dict[StatefulNode, None] = {}
    _find_stateful(node, nodes)
    return list(nodes)


def _find_stateful(node: Node, nodes: dict[StatefulNode, None]) -> None:
    if isinstance(node, StatefulNode):
        # A dict, because a node that is used twice is counted once, and a set has no order to save states by.
        nodes[node] = None
        if not node.inner:
            return
    for below in node.inputs:
        _find_stateful(below, nodes)


def first_spec(node: Node) -> Element:
    """Return the spec of the first element, which is computed for that; no pass is counted."""
    # The passes are only peeked at, so that to ask for a spec does not change the order of the first epoch.
    iterator = node.iterate(Pass({below: below.peek() for below in stateful_nodes(node)}))
    try:
        return spec_of(next(iterator))
    except StopIteration:
        raise InvalidArgumentError(
            "A data set of a Python function must have an element, for its spec to be found. "
            f"Received: an empty data set, {describe(node)}. Pass an output_signature to from_generator."
        ) from None
    finally:
        iterator.close()


def describe(node: Node) -> str:
    """Return the names of the nodes, as in `Shuffle(Slices)`."""
    below = ", ".join(describe(part) for part in node.inputs)
    return f"{node.label}({below})" if below else node.label


class PipelineIterator(StateIterator, DataIterator):
    """Iterates once over a pipeline; its state is a small JSON object."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node
        self._start([stateful.begin() for stateful in stateful_nodes(node)])

    def _start(self, draws: Sequence[Draw]) -> None:
        self._draws = list(draws)
        self._inner = self._node.iterate(Pass(dict(zip(stateful_nodes(self._node), draws, strict=True))))

    def __iter__(self) -> PipelineIterator:
        note_iteration(self)
        return self

    def __next__(self) -> Element:
        # A traced function reads its batches through a `Reader`: read here, a batch would become a constant
        # of the compiled program.
        reader = current_reader()
        return next(self._inner) if reader is None else reader.read(self, lambda: next(self._inner))

    def next(self) -> Element:
        """Return the next element, as `tf.data`'s iterators do."""
        return self.__next__()

    def get_state(self) -> dict[str, Any]:
        """Return the state: the position of the iteration, and the numbers of its pass."""
        # The names of the nodes let `set_state` reject the state of another pipeline.
        return {"pipeline": describe(self._node), "passes": self._draws, "position": self._inner.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at the position of the iterator that returned `state`, in its pass.

        The next iteration then follows that pass.

        Raises:
            InvalidArgumentError: The state belongs to another pipeline.
        """
        if state.get("pipeline") != describe(self._node):
            raise InvalidArgumentError(
                "A state must belong to the same pipeline. "
                f"Received: the state of {state.get('pipeline')} for {describe(self._node)}. "
                "Build the data set with the same calls in the same order."
            )
        # Before the inner iterator is started: a cache decides at its start whether its store has this pass.
        for stateful, draw in zip(stateful_nodes(self._node), state["passes"], strict=True):
            stateful.resume(draw)
        self._inner.close()
        self._start(state["passes"])
        self._inner.set_state(state["position"])

    def start_prefetch(self) -> None:
        """Start to read ahead now, where the pipeline does so, instead of with the first `next`."""
        self._inner.start_prefetch()

    def close(self) -> None:
        """End the iteration and stop its threads."""
        super().close()
        self._inner.close()

    def __str__(self) -> str:
        return f"PipelineIterator({describe(self._node)})"
