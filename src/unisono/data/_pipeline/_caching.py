"""`cache()`: store the elements of the first pass over a pipeline for all later passes.

Tests: tests/unit/data/test_dataset_cache.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import grain
import numpy as np

from unisono.data._pipeline._cardinality import UNKNOWN
from unisono.data._pipeline._plan import (
    Draw,
    IndexedNode,
    Node,
    Pass,
    StatefulNode,
    StateIterator,
    UnaryNode,
    stateful_nodes,
)
from unisono.data._pipeline._store import Store
from unisono.data._pipeline._structure import Element


class Pin:
    """The pass whose elements a cache holds; None before the first."""

    def __init__(self) -> None:
        self.draws: list[Draw] | None = None
        self.run: Pass | None = None


class _Cache(StatefulNode, UnaryNode):
    """Holds the elements of the first pass: later passes have the same shuffled order.

    Args:
        store: The storage of its elements; it may hold a part of them.
    """

    store: Store
    pin: Pin = dataclasses.field(default_factory=Pin, kw_only=True)

    @property
    def cardinality(self) -> int:
        known = self.parent.cardinality
        return self.store.size if known == UNKNOWN and self.store.size is not None else known

    @property
    # Every repetition reads what the first one stored.
    def varies(self) -> bool:
        return False

    @property
    # The passes below are part of this node's own number: they are fixed when the cache is first filled.
    def inner(self) -> bool:
        return False

    def peek(self) -> Draw:
        return (
            # These numbers pin nothing: `held` finds that the pin has others, and an element that
            # is computed for its spec is not stored.
            [node.peek() for node in stateful_nodes(self.parent)]
            if self.pin.draws is None
            else self.pin.draws
        )

    def begin(self) -> Draw:
        if self.pin.draws is None:
            self._hold([node.begin() for node in stateful_nodes(self.parent)])
        return self.pin.draws

    def resume(self, draw: Draw) -> None:
        # A state that was saved with another filling restores that one's order, and the elements stored so
        # far belong to the old one.
        if self.pin.draws != draw:
            for node, below in zip(stateful_nodes(self.parent), draw, strict=True):
                node.resume(below)
            self.store.clear()
            self._hold(draw)

    def with_inputs(self, inputs: Mapping[Node, Node]) -> Self:
        # The stored elements come from the old inputs.
        return dataclasses.replace(super().with_inputs(inputs), store=self.store.fresh(), pin=Pin())

    def _hold(self, draws: list[Draw]) -> None:
        self.pin.draws = draws
        self.pin.run = self._pass(draws)

    def _pass(self, draws: list[Draw]) -> Pass:
        return Pass(dict(zip(stateful_nodes(self.parent), draws, strict=True)))

    def held(self, run: Pass) -> tuple[Pass, bool]:
        """Return the pass over the parent that `run` needs, and whether the store belongs to it."""
        # A cache inside a data set that a function returned has no number in the pass around it.
        draws = run.draws[self] if self in run.draws else self.begin()
        if draws == self.pin.draws and self.pin.run is not None:
            return self.pin.run, True
        # Another iterator has restored a different pass since this one started: continue without the store.
        return self._pass(draws), False


class IndexedCache(_Cache, IndexedNode):
    """Stores elements by position, in the order of the requests."""

    parent: IndexedNode

    def rows(self, run: Pass, positions: np.ndarray) -> list[Element]:
        held, current = self.held(run)
        if not current:
            return self.parent.rows(held, positions)
        wanted = positions.tolist()
        kept = {position: self.store.get(position) for position in wanted}
        missing = [position for position, element in kept.items() if element is None]
        if missing:
            for position, element in zip(missing, self.parent.rows(held, np.array(missing)), strict=True):
                self.store.put(position, element)
                # Read back, so that the first pass returns the same read-only elements as later ones.
                kept[position] = self.store.get(position) or (element,)
            self.store.finish(self.cardinality)
        return [element for position in wanted for element in kept[position] or ()]


class StreamCache(_Cache):
    """Stores elements in the order of the stream."""

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        held, current = self.held(run)
        return _CachedIterator(self, held) if current else self.parent.iterate(held)


class _CachedIterator(StateIterator):
    """Reads the store, and the stream where the store ends."""

    def __init__(self, node: StreamCache, held: Pass) -> None:
        super().__init__()
        self._node = node
        self._held = held
        self._position = 0
        # Opened when the store lacks an element; it may lag behind `position`.
        self._stream: grain.DatasetIterator | None = None
        self._stream_position = 0

    def __next__(self) -> Element:
        store = self._node.store
        while True:
            element = store.get(self._position)
            if element is not None:
                self._position += 1
                return element[0]
            if store.size is not None and self._position >= store.size:
                raise StopIteration
            # The store may lack earlier elements, too, where a restored iterator started in the middle: the
            # loop reads and stores all up to its own position.
            self._read_one()

    def _read_one(self) -> None:
        if self._stream is None:
            self._stream = self._node.parent.iterate(self._held)
            self._stream_position = 0
        try:
            element = next(self._stream)
        except StopIteration:
            self._node.store.finish(self._stream_position)
            self._position = max(self._position, self._stream_position)
            raise
        self._node.store.put(self._stream_position, element)
        self._stream_position += 1

    def get_state(self) -> dict[str, Any]:
        # The stream's own state is not needed: a restored iterator reads the store, or the stream from its
        # start.
        return {"position": self._position}

    def set_state(self, state: dict[str, Any]) -> None:
        self._position = state["position"]

    def close(self) -> None:
        super().close()
        if self._stream is not None:
            self._stream.close()
