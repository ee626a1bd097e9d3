"""Batches that one program runs: one alone, or several of one shape.

`steps_per_execution=K` and the steps that run ahead of Keras' loop are two sizes of the same group.

Tests: tests/virtual/training/test_lookahead.py, tests/virtual/training/test_counts.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

from unisono._types import PyTree
from unisono.training.groups._batch_placement import BatchStager
from unisono.training.groups._batch_policy import Mode
from unisono.training.groups._host_timing import HostTimer


class BatchGroup:
    """What one program runs.

    Args:
        first: the first batch; pytree of host arrays.
        mode: how its rows reach the replicas, and those of all others.
        stager: collects the batches; None for one that runs alone. A group whose program cannot have a
            loop gives it up before it runs.
        keeps_state: whether the state that the program is given can be used again.
    """

    def __init__(
        self,
        first: PyTree,
        mode: Mode,
        rows: int,
        stager: BatchStager | None = None,
        keeps_state: bool = False,
    ) -> None:
        self.first, self.mode, self.rows, self.stager = first, mode, rows, stager
        self.keeps_state = keeps_state
        #: How many batches there are. The stager's own count is that of its last group.
        self.count = 1
        #: The batches, as long as the steps may have to run again.
        self.batches: list[PyTree] = [first]
        #: Seconds that it took to get and stage the batches after the first.
        self.seconds = 0.0
        if stager is not None:
            stager.begin()
            stager.append(first)

    @property
    def slots(self) -> int:
        """How many batches the program has room for."""
        return 1 if self.stager is None else self.stager.slots

    @property
    def form(self) -> tuple[Mode, int, int, bool]:
        """What distinguishes its program from those of other groups."""
        return self.mode, self.rows, self.slots, self.keeps_state

    def fill(self, batches: Iterable[PyTree], timer: HostTimer) -> None:
        """Stage the batches that follow the first, each before the next is made."""
        if self.stager is None:
            return
        began = perf_counter()
        for batch in batches:
            taken = perf_counter()
            self.stager.append(batch)
            timer.placing += perf_counter() - taken
            self.count += 1
            if self.keeps_state:
                self.batches.append(batch)
        self.seconds = perf_counter() - began
