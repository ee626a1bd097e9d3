"""A stateful step that one program repeats over several batches, for steps that run ahead of Keras' loop.

Tests: tests/virtual/training/stateful/test_ahead.py.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from unisono._types import PyTree
from unisono.step._call_signature import Call
from unisono.step._compiler import Entry
from unisono.step._functional import ReplicatedStep
from unisono.training.groups._batch_placement import BatchStager
from unisono.training.stateful._grouped_program import GroupedProgram, GroupEntry


class RepeatedEntry(GroupEntry):
    """A compiled program that repeats a stateful step over several batches."""

    def __init__(self, one: Entry, fn: Callable[[PyTree], PyTree], call: Call, slots: int) -> None:
        strategy = one.strategy
        self._agrees = strategy.process_group.size > 1
        step = ReplicatedStep(strategy, fn, call, one.plan)
        program = GroupedProgram(step, slots, splits_rows=True, agrees=self._agrees)
        super().__init__(program, one.plan, strategy)
        #: Whether it has run.
        self.is_used = False

    @property
    def num_other_outputs(self) -> int:
        """How many arrays the program returns besides the results of the steps."""
        return sum(slot.written for slot in self.plan.slots) + self._agrees

    def run(self, stager: BatchStager, wish: int) -> tuple[PyTree, jax.Array | None]:
        """Start the steps of the batches that were staged.

        Returns:
            The results, stacked, and the smallest wish of all processes; None in a lone process.
        """
        self.is_used = True
        found = self(self.call_with(stager, wish))
        return found if self._agrees else (found, None)

    def call_with(self, stager: BatchStager, wish: int) -> Call:
        """Return a call whose arrays are on the devices."""
        count, batches = stager.place()
        proposed = [self.strategy.mesh.put_own(np.int32(wish))] if self._agrees else []
        return self.call_of([*proposed, count, *jax.tree.leaves(batches)])

    def note(self, call: Call) -> None:
        """Do nothing: each batch was noted when it was taken."""
