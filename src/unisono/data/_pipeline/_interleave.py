"""`interleave` and `flat_map`: each element becomes a data set, whose elements are yielded in turn.

Tests: tests/unit/data/test_dataset_further.py, tests/unit/data/test_dataset_state.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import grain

from unisono.data._pipeline._cardinality import INFINITE, UNKNOWN
from unisono.data._pipeline._plan import CountingNode, Node, Pass, SelectiveNode, StateIterator, first_spec
from unisono.data._pipeline._streams import StreamReadAhead
from unisono.data._pipeline._structure import Element, unbatched_spec


class Interleave(CountingNode, SelectiveNode):
    """The elements of the data sets that a function returns, a block from each of several in turn.

    Args:
        ahead: Number of elements that a thread reads ahead from each; 0 for no thread.
    """

    fn: Callable[[Element], Node]
    cycle_length: int
    block_length: int
    ahead: int

    @property
    def spec(self) -> Element:
        return first_spec(self)

    @property
    def varies(self) -> bool:
        # The data sets that the function returns may be shuffled.
        return True

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        # Grain's own interleave has no `block_length`.
        return _InterleaveIterator(self, self.parent.iterate(run), run)


class Unbatch(Interleave):
    """The rows of each element. Grain's flat map repeats rows when a state at its end is restored."""

    @property
    def cardinality(self) -> int:
        return self.parent.cardinality if self.parent.cardinality in (0, INFINITE) else UNKNOWN

    @functools.cached_property
    def spec(self) -> Element:
        return unbatched_spec(self.parent.spec)


@dataclasses.dataclass
class _CycleElement:
    """An open data set.

    Args:
        number: The number of the parent's element from which it was created.
        before: State of the parent before that element.
    """

    number: int
    before: dict[str, Any]
    iterator: grain.DatasetIterator


class _InterleaveIterator(StateIterator):
    """Interleaves in the order of tf.data's kernel, `InterleaveDatasetOp`."""

    def __init__(self, node: Interleave, parent: grain.DatasetIterator, run: Pass) -> None:
        super().__init__(parent)
        self._node = node
        self._source = parent
        self._run = run.at(run.draws.get(node, 0))
        self._slots: list[_CycleElement | None] = [None] * node.cycle_length
        self._cycle = self._block = self._opened = 0
        self._is_parent_done = False

    def __next__(self) -> Element:
        while not self._is_parent_done or any(self._slots):
            slot = self._slots[self._cycle]
            if slot is None:
                self._fill()
                continue
            try:
                element = next(slot.iterator)
            except StopIteration:
                # A data set that ends gives up the rest of its block, and a later `_fill` opens another in
                # its slot: the order of tf.data, as in the example of its documentation.
                slot.iterator.close()
                self._slots[self._cycle] = None
                self._turn()
                continue
            self._block += 1
            if self._block == self._node.block_length:
                self._turn()
            return element
        raise StopIteration

    def _turn(self) -> None:
        self._block = 0
        self._cycle = (self._cycle + 1) % self._node.cycle_length

    def _fill(self) -> None:
        if self._is_parent_done:
            self._turn()
            return
        # Kept with the slot: the data set cannot be saved, and is created again from this element.
        before = self._source.get_state()
        try:
            element = next(self._source)
        except StopIteration:
            self._is_parent_done = True
            return
        self._slots[self._cycle] = self._open(self._opened, before, element)
        self._opened += 1

    def _open(self, number: int, before: dict[str, Any], element: Element) -> _CycleElement:
        made = self._node.fn(element)
        if self._node.ahead:
            made = StreamReadAhead(made, self._node.ahead)
        # The data set may be new or the same for all elements. Either way its shuffles must differ by pass
        # and by element, so these numbers are its path.
        return _CycleElement(number, before, made.iterate(Pass({}, self._run.at(number).path)))

    def get_state(self) -> dict[str, Any]:
        slots = [
            None
            if slot is None
            else {"number": slot.number, "before": slot.before, "at": slot.iterator.get_state()}
            for slot in self._slots
        ]
        place = [self._cycle, self._block, self._opened, self._is_parent_done]
        return {"parent": self._source.get_state(), "slots": slots, "place": place}

    def set_state(self, state: dict[str, Any]) -> None:
        # The slots before the source: to reopen one, the source is set back to before its element.
        self._close_slots()
        self._cycle, self._block, self._opened, self._is_parent_done = state["place"]
        self._slots = [None if slot is None else self._reopen(slot) for slot in state["slots"]]
        self._source.set_state(state["parent"])

    def _reopen(self, state: dict[str, Any]) -> _CycleElement:
        # The user's function runs again, so it must return the same data set for the same element.
        self._source.set_state(state["before"])
        slot = self._open(state["number"], state["before"], next(self._source))
        slot.iterator.set_state(state["at"])
        return slot

    def _close_slots(self) -> None:
        for slot in self._slots:
            if slot is not None:
                slot.iterator.close()

    def close(self) -> None:
        super().close()
        self._close_slots()
