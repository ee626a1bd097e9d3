"""A step that one program repeats over a group of batches: of a `model_fn`, or in TensorFlow's form.

Tests: tests/virtual/training/stateful/test_ahead.py, tests/virtual/estimator/test_counts.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from unisono._context import OneReplica, ReplicaEngine
from unisono._mesh import AXIS
from unisono._types import PyTree
from unisono.step._call_signature import Call, Output
from unisono.step._compiler import Entry
from unisono.step._engines import SHARDED, UNSHARDED, SpmdEngine
from unisono.step._functional import ReplicatedStep, Slot
from unisono.training.groups._agreed_size import smallest_of
from unisono.training.groups._batch_placement import BatchStager
from unisono.training.groups._constant_loop import constant_loop
from unisono.training.groups._multi_step import multi_step_program

#: How the batches of a group lie on the replicas: each is split along its rows, or has an axis of replicas.
_STACKED = PartitionSpec(None, AXIS)


@dataclasses.dataclass(frozen=True, eq=False)
class GroupedProgram:
    """A step on all replicas, repeated over a group of batches; a pure function as `ReplicatedStep` is.

    Args:
        one: the step of one batch, with its plan; it returns `Mirrored` values alone.
        is_whole: whether every replica computes the whole batch.
        splits_rows: whether a batch is split along its rows; otherwise its first axis is that of replicas.
        agrees: whether all processes agree on the size of the next group.
        is_constant: whether there are always as many batches as slots.
    """

    one: ReplicatedStep
    slots: int
    is_whole: bool = False
    splits_rows: bool = False
    agrees: bool = False
    is_constant: bool = False

    def __call__(self, values: list[jax.Array], arrays: list[jax.Array]) -> tuple[PyTree, list[jax.Array]]:
        """Return the results of all steps, stacked, and the new values of the written variables.

        If `agrees`, the results are a tuple of the steps' and of the smallest size that a process proposes.

        Args:
            arrays: the number of batches, and the batches' arrays, with a first dimension of `slots`; if
                `agrees`, the size that each replica's process proposes precedes them.
        """
        self.one.scopes.clear()
        replicas, slots = self.one.replicas, self._plan_slots
        outputs: list[Output] = []
        axis = AXIS if replicas.num_replicas_in_sync > 1 else None
        proposed, (count, *batches) = (arrays[:1], arrays[1:]) if self.agrees else ([], arrays)

        def several(
            values: list[jax.Array], proposed: list[jax.Array], count: jax.Array, batches: list[jax.Array]
        ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
            state = [v for v, s in zip(values, slots, strict=True) if s.written]
            step = self._step_of(values, outputs)
            if self.slots == 1:
                last, new = step(state, [x[0] for x in batches])
                results = [x[None] for x in last]
            else:
                number = self.slots if self.is_constant else count
                in_loop = constant_loop if self.is_constant else multi_step_program
                results, new = in_loop(step, self.slots)(state, (number, batches))
            return results, [smallest_of(x, axis) for x in proposed], new

        if self._is_split:
            specs = [s.layout.spec for s in slots]
            written = [p for p, s in zip(specs, slots, strict=True) if s.written]
            several = replicas.mesh.on_replicas(
                several,
                (specs, [SHARDED] * len(proposed), UNSHARDED, [_STACKED] * len(batches)),
                (UNSHARDED, UNSHARDED, written),
            )
        results, agreed, new = several(values, proposed, count, batches)
        value: PyTree = outputs[-1].rebuild([], results).value
        return ((value, *agreed) if self.agrees else value), new

    @property
    def _plan_slots(self) -> tuple[Slot, ...]:
        return self.one.plan.slots if self.one.plan else ()

    @property
    def _is_split(self) -> bool:
        return self.one.replicas.num_replicas_in_sync > 1 and not self.is_whole

    def _step_of(
        self, values: list[jax.Array], outputs: list[Output]
    ) -> Callable[[list[jax.Array], list[jax.Array]], tuple[list[Any], list[jax.Array]]]:
        """Return the step of one replica as a function of what it writes and of its part of a batch."""
        replicas = self.one.replicas
        engine: ReplicaEngine = OneReplica()
        if self._is_split:
            engine = SpmdEngine(replicas.num_replicas_in_sync, replicas.cross_device_ops)

        def step(state: list[jax.Array], batch: list[jax.Array]) -> tuple[list[Any], list[jax.Array]]:
            of_written = iter(state)
            pairs = zip(values, self._plan_slots, strict=True)
            current = [next(of_written) if s.written else v for v, s in pairs]
            parts = [x[None] for x in batch] if self._is_split and self.splits_rows else batch
            output, _, results, new = self.one.one_replica(engine, current, parts)
            outputs.append(output)
            return results, new

        return step


class GroupEntry(Entry):
    """A compiled `GroupedProgram`, whose batches were placed when they were collected."""

    @staticmethod
    def call_of(arrays: list[jax.Array]) -> Call:
        """Return a call.

        Args:
            arrays: as a `GroupedProgram` takes them, on their devices.
        """
        return Call.parse(tuple(arrays), {})

    def place_arrays(self, call: Call) -> list[jax.Array]:
        """Return the arrays of a call, as they are."""
        return call.arrays


class RepeatedEntry(GroupEntry):
    """A compiled program that repeats a step in TensorFlow's form over several batches."""

    def __init__(
        self, one: Entry, fn: Callable[[PyTree], PyTree], call: Call, slots: int, is_constant: bool
    ) -> None:
        replicas = one.replicas
        self._agrees = replicas.process_group.size > 1 and not is_constant
        step = ReplicatedStep(replicas, fn, call, one.plan)
        program = GroupedProgram(step, slots, splits_rows=True, agrees=self._agrees, is_constant=is_constant)
        super().__init__(program, one.plan, replicas)
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
        proposed = [self.replicas.mesh.put_own(np.int32(wish))] if self._agrees else []
        return self.call_of([*proposed, count, *jax.tree.leaves(batches)])

    def note(self, call: Call) -> None:
        """Do nothing: each batch was noted when it was taken."""
