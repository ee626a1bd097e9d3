"""The compiled programs of a `model_fn`: its step on all replicas, once or over a group of batches.

Tests: tests/virtual/estimator/test_train.py, tests/virtual/estimator/test_counts.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from unisono._context import OneReplica, ReplicaEngine
from unisono._lowering._executables import Executables
from unisono._mesh import AXIS
from unisono._types import PyTree
from unisono._values import Mirrored, PerReplica
from unisono.step._call_signature import Call, Output
from unisono.step._compiler import Entry
from unisono.step._engines import UNSHARDED, SpmdEngine
from unisono.step._functional import Replicated, StatePlan, discarded, discover
from unisono.training.trainer._multi_step import multi_step_program

if TYPE_CHECKING:
    from unisono.strategies._replicated import ReplicatedStrategy

#: The step of one replica: from an element of its data to named values, which are the same on all replicas.
Step = Callable[[PyTree], Mirrored[Any]]


@dataclasses.dataclass(frozen=True)
class PlacedArrays:
    """The arguments of a program, which lie on the devices already.

    Args:
        arrays: the number of batches, and the batches' arrays.
    """

    arrays: list[Any]


class _GroupEntry(Entry):
    """A program whose batches were placed by who has collected them."""

    def place_arrays(self, call: Call) -> list[Any]:
        """Return the arrays of a call, as they are.

        Args:
            call: `PlacedArrays`.
        """
        return list(call.arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class GroupedStep:
    """A step that is repeated over a group of batches, as a pure function of values and arrays.

    Args:
        replicated: the step of one batch on all replicas, with its plan.
        slots: how many batches there is room for.
        is_whole: whether every replica computes the whole batch.
        names: of what the step returns; filled when it is traced.
    """

    replicated: Replicated
    slots: int
    is_whole: bool

    def __call__(self, values: list[Any], arrays: list[Any]) -> tuple[PyTree, list[Any]]:
        """Return the named values of each batch, stacked, and the new values of the written variables.

        Args:
            values: one for each slot of the plan.
            arrays: how many batches there are, and their arrays, with a first dimension of `slots`.
        """
        strategy = self.replicated.strategy
        slots = self.replicated.plan.slots if self.replicated.plan else ()
        outputs: list[Output] = []
        is_split = strategy.num_replicas_in_sync > 1 and not self.is_whole

        def body(values: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
            engine: ReplicaEngine = OneReplica()
            if is_split:
                engine = SpmdEngine(strategy.num_replicas_in_sync, strategy.cross_device_ops)
            return self._steps(engine, values, arrays, outputs)

        if is_split:
            specs = [s.layout.spec for s in slots]
            batches = [PartitionSpec(None, AXIS)] * (len(arrays) - 1)
            written = [p for p, s in zip(specs, slots, strict=True) if s.written]
            body = jax.shard_map(
                body, mesh=strategy.mesh.mesh, in_specs=(specs, [UNSHARDED, *batches]),
                out_specs=(UNSHARDED, written), check_vma=False,
            )  # fmt: skip
        logs, new = body(values, arrays)
        named: Mirrored[Any] = outputs[-1].rebuild([], logs)
        return named.value, new

    def _steps(
        self, engine: ReplicaEngine, values: list[Any], arrays: list[Any], outputs: list[Output]
    ) -> tuple[list[Any], list[Any]]:
        """Run the steps of one replica."""
        slots = self.replicated.plan.slots if self.replicated.plan else ()
        count, *batches = arrays

        def step(state: list[Any], batch: list[Any]) -> tuple[list[Any], list[Any]]:
            following = iter(state)
            now = [next(following) if s.written else v for s, v in zip(slots, values, strict=True)]
            output, _, mirrored, new = self.replicated.one_replica(engine, now, batch)
            outputs.append(output)
            return mirrored, new

        state = [v for s, v in zip(slots, values, strict=True) if s.written]
        if self.slots == 1:
            logs, new = step(state, [x[0] for x in batches])
            return [x[None] for x in logs], new
        found: tuple[list[Any], list[Any]] = multi_step_program(step, self.slots)(state, (count, batches))
        return found


class Programs:
    """The programs of one step function: one for each shape of its batches, and each number of slots.

    Args:
        strategy: on whose replicas.
        executables: of the Estimator, whose earlier trainings and evaluations had equal programs.
    """

    def __init__(self, strategy: ReplicatedStrategy, executables: Executables | None = None) -> None:
        self._strategy, self._executables = strategy, executables
        self._entries: dict[Hashable, _GroupEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def create_variables(self, step: Step, batch: PyTree, is_whole: bool) -> None:
        """Trace a step without computing it, so that the variables are made that it creates.

        Args:
            step: of one replica.
            batch: as for a program.
            is_whole: whether every replica computes the whole batch.
        """
        self._plan(step, _call(batch, is_whole, self._strategy.num_replicas_in_sync))

    def __call__(
        self, step: Step, key: Hashable, like: PyTree, slots: int, is_whole: bool
    ) -> Callable[[PlacedArrays], Mapping[str, jax.Array]]:
        """Return the program for a step and the form of its batches.

        Args:
            step: of one replica.
            key: what distinguishes the step from others of these programs.
            like: a batch: elements with a leading axis of this process' replicas; or rows for all.
            slots: how many batches there is room for.
            is_whole: whether every replica computes the whole batch.
        """
        leaves, structure = jax.tree.flatten(like)
        shapes = tuple((x.shape, str(x.dtype)) for x in leaves)
        full = (key, structure, shapes, slots, is_whole)
        if full not in self._entries:
            call = _call(like, is_whole, self._strategy.num_replicas_in_sync)
            plan = self._plan(step, call)
            replicated = Replicated(self._strategy, step, call, plan)
            traced = GroupedStep(replicated, slots, is_whole)
            self._entries[full] = _GroupEntry(traced, plan, self._strategy, executables=self._executables)
        return self._entries[full]  # type: ignore[return-value]

    def _plan(self, step: Step, call: Call) -> StatePlan:
        """Return the variables of a step; make those that it creates."""
        replicated = Replicated(self._strategy, step, call)
        discover(lambda arrays: discarded(replicated([], arrays)), call.arrays)
        plan = StatePlan.from_scopes(replicated.scopes, self._strategy.state_layout)
        for slot in plan.slots:
            if slot.is_stacked:
                slot.variable.promote(self._strategy.num_replicas_in_sync)
        return plan


def _call(batch: PyTree, is_whole: bool, replicas: int) -> Call:
    """Return a step's call with a batch."""
    if is_whole:
        return Call.parse((batch,), {})
    # This process may have the elements of its own replicas alone: their form is what counts.
    every = [np.broadcast_to(x[0], (replicas, *x.shape[1:])) for x in jax.tree.leaves(batch)]
    elements = [PerReplica.from_stacked(x) for x in every]
    return Call.parse((jax.tree.unflatten(jax.tree.structure(batch), elements),), {})
