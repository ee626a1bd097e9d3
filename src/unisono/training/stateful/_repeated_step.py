"""A stateful step that one program repeats over several batches, for steps that run ahead of Keras' loop.

Tests: tests/virtual/training/stateful/test_ahead.py.
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
from unisono._values import Mirrored
from unisono.step._call_signature import Call, Output
from unisono.step._compiler import Entry
from unisono.step._engines import SHARDED, UNSHARDED, SpmdEngine
from unisono.step._functional import Replicated
from unisono.training.trainer._batch_placement import BatchStager
from unisono.training.trainer._multi_step import multi_step_program

#: How the batches of a group lie on the replicas: each is split along its rows.
_STACKED = PartitionSpec(None, AXIS)


@dataclasses.dataclass(frozen=True, eq=False)
class RepeatedStep:
    """A step on all replicas, repeated; a pure function as `Replicated` is.

    Args:
        one: the step of one batch, which returns `Mirrored` alone.
        slots: how many batches there is room for.
    """

    one: Replicated
    slots: int

    def __call__(self, values: list[Any], arrays: list[Any]) -> tuple[Any, list[Any]]:
        """Return the results of all steps, stacked, with the group size that all processes wish for.

        Args:
            values: of the plan's variables.
            arrays: the wish of each replica's process, the number of batches, and the batches' arrays.
        """
        self.one.scopes.clear()
        strategy, slots = self.one.strategy, self._plan_slots
        must_agree = strategy.process_group.size > 1
        outputs: list[Output] = []

        def several(values: list[Any], wish: Any, count: Any, batches: list[Any]) -> tuple[Any, ...]:
            state = [v for v, s in zip(values, slots, strict=True) if s.written]
            program = multi_step_program(self._step_of(values, outputs), self.slots)
            results, new = program(state, (count, batches))
            agreed = jax.lax.pmin(wish[0], AXIS) if must_agree else wish
            return results, agreed, new

        wish, count, *batches = arrays
        if strategy.num_replicas_in_sync > 1:
            specs = [s.layout.spec for s in slots]
            written = [p for p, s in zip(specs, slots, strict=True) if s.written]
            several = jax.shard_map(
                several,
                mesh=strategy.mesh.mesh,
                in_specs=(specs, SHARDED if must_agree else UNSHARDED, UNSHARDED, [_STACKED] * len(batches)),
                out_specs=(UNSHARDED, UNSHARDED, written),
                check_vma=False,
            )
        results, agreed, new = several(values, wish, count, batches)
        return Mirrored((outputs[-1].rebuild([], results).value, agreed)), new

    @property
    def _plan_slots(self) -> tuple[Any, ...]:
        return self.one.plan.slots if self.one.plan else ()

    def _step_of(self, values: list[Any], outputs: list[Output]) -> Callable[[PyTree, PyTree], PyTree]:
        """Return the step of one replica as a function of what it writes and of its part of a batch."""
        replicas = self.one.strategy.num_replicas_in_sync
        engine: ReplicaEngine = OneReplica()
        if replicas > 1:
            engine = SpmdEngine(replicas, self.one.strategy.cross_device_ops)

        def step(state: list[Any], batch: list[Any]) -> tuple[list[Any], list[Any]]:
            of_written = iter(state)
            pairs = zip(values, self._plan_slots, strict=True)
            current = [next(of_written) if s.written else v for v, s in pairs]
            parts = [x[None] for x in batch] if replicas > 1 else batch
            output, _, results, new = self.one.one_replica(engine, current, parts)
            outputs.append(output)
            return results, new

        return step


class RepeatedEntry(Entry):
    """A compiled program that repeats a stateful step over several batches.

    Args:
        one: the compiled step of one batch.
        fn: what each replica calls.
        call: with one batch.
        slots: how many batches there is room for.
    """

    def __init__(self, one: Entry, fn: Callable[[PyTree], PyTree], call: Call, slots: int) -> None:
        strategy = one.strategy
        step = Replicated(strategy, fn, call, one.plan)
        super().__init__(RepeatedStep(step, slots), one.plan, strategy)
        #: Whether it has run.
        self.is_used = False

    @property
    def num_written(self) -> int:
        """How many variables the step writes."""
        return sum(slot.written for slot in self.plan.slots)

    def run(self, stager: BatchStager, wish: int) -> tuple[PyTree, jax.Array]:
        """Start the steps of the batches that were staged.

        Args:
            stager: with the batches.
            wish: the group size that this process proposes.

        Returns:
            The results, stacked, and the smallest wish of all processes.
        """
        self.is_used = True
        found: tuple[PyTree, jax.Array] = self(self.call_with(stager, wish)).value
        return found

    def call_with(self, stager: BatchStager, wish: int) -> Call:
        """Return a call whose arrays are on the devices.

        Args:
            stager: with the batches.
            wish: the group size that this process proposes.
        """
        count, batches = stager.place()
        mesh = self.strategy.mesh
        # Only processes that must agree look at it.
        wished = stager.number(0)
        if self.strategy.process_group.size > 1:
            wished = mesh.put_own(np.int32(wish))
        return Call.parse((wished, count, *jax.tree.leaves(batches)), {})

    def note(self, call: Call) -> None:
        """Do nothing: each batch was noted when it was taken."""

    def place_arrays(self, call: Call) -> list[Any]:
        """Return the arrays, which are on their devices."""
        return call.arrays
