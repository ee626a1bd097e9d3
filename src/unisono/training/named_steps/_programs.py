"""The compiled programs of a named step: on all replicas, once or over a group of batches.

Tests: tests/virtual/estimator/test_train.py, tests/virtual/estimator/test_counts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from unisono._lowering._compiler_options import Executables
from unisono._types import PyTree
from unisono._values import Mirrored, PerReplica
from unisono.step._call_signature import Call
from unisono.step._compiler import StepCompiler
from unisono.step._functional import ReplicatedStep
from unisono.training.groups._batch_placement import form_of
from unisono.training.stateful._grouped_program import GroupedProgram, GroupEntry

if TYPE_CHECKING:
    from unisono.step._replicas import Replicas

#: The step of one replica: from an element of its data to named values, which are the same on all replicas.
Step = Callable[[PyTree], Mirrored[Any]]


class Programs:
    """The programs of one step function: one for each shape of its batches, and each number of slots.

    Args:
        executables: of earlier trainings and evaluations, which may have had equal programs.
        is_constant: whether a program always has as many batches as slots.
    """

    def __init__(
        self, replicas: Replicas, executables: Executables | None = None, is_constant: bool = False
    ) -> None:
        self._replicas, self._executables, self._is_constant = replicas, executables, is_constant
        self._compiler = StepCompiler(replicas, warns=False)
        self._entries: dict[Hashable, GroupEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def create_variables(self, step: Step, batch: PyTree, is_whole: bool) -> None:
        """Trace a step without computing it, so that the variables are made that it creates."""
        self._compiler.entry(step, _call(batch, is_whole, self._replicas.num_replicas_in_sync))

    def __call__(self, step: Step, key: Hashable, like: PyTree, slots: int, is_whole: bool) -> GroupEntry:
        """Return the program for a step and the form of its batches.

        Args:
            like: a batch: elements with a leading axis of this process' replicas; or rows for all.
        """
        full = (key, form_of(like), slots, is_whole)
        if full not in self._entries:
            call = _call(like, is_whole, self._replicas.num_replicas_in_sync)
            plan = self._compiler.entry(step, call).plan
            replicated = ReplicatedStep(self._replicas, step, call, plan)
            traced = GroupedProgram(replicated, slots, is_whole, is_constant=self._is_constant)
            self._entries[full] = GroupEntry(traced, plan, self._replicas, executables=self._executables)
        return self._entries[full]

    def remove(self, program: GroupEntry) -> None:
        """Forget a program that is not used."""
        self._entries = {key: entry for key, entry in self._entries.items() if entry is not program}


def _call(batch: PyTree, is_whole: bool, replicas: int) -> Call:
    """Return a step's call with a batch."""
    if is_whole:
        return Call.parse((batch,), {})
    # This process may have the elements of its own replicas alone: their form is what counts.
    every = [np.broadcast_to(x[0], (replicas, *x.shape[1:])) for x in jax.tree.leaves(batch)]
    elements = [PerReplica.from_stacked(x) for x in every]
    return Call.parse((jax.tree.unflatten(jax.tree.structure(batch), elements),), {})
