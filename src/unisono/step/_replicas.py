"""`Replicas`: what steps know of a strategy.

Tests: tests/virtual/step/test_replicas.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from unisono._context import Context, ReplicaContext
from unisono._types import PyTree

if TYPE_CHECKING:
    from unisono._context import ReplicaEngine
    from unisono._mesh import ReplicaMesh
    from unisono.collectives._cross_device import CrossDeviceOps
    from unisono.collectives._process_group import ProcessGroup
    from unisono.step._layout import StateLayout


@dataclasses.dataclass(eq=False)
class Replicas:
    """The replicas that run a step: their devices and processes, their state, and how values are reduced.

    Args:
        mesh: the devices that compute, in replica order.
        process_group: the processes that train together.
        state_layout: where the state rests between steps.
        cross_device_ops: how an all-reduce is done.
        owner: the strategy, for user code in a step that asks for it; without one it gets this record.
        joins_rows: whether one program over all devices computes rows that depend on each other.
    """

    mesh: ReplicaMesh
    process_group: ProcessGroup
    state_layout: StateLayout
    cross_device_ops: CrossDeviceOps
    owner: Any = None
    joins_rows: bool = False
    # The steps that have begun with values that all processes hold.
    _begun: set[str] = dataclasses.field(default_factory=set, init=False)

    #: No context of these replicas is that of code outside of every scope.
    _is_default = False

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self.mesh.num_replicas

    @property
    def _replicated(self) -> Replicas:
        """These replicas."""
        return self

    def context(
        self, engine: ReplicaEngine | None = None, *, means: bool = False, true_rows: int | None = None
    ) -> Context:
        """Return the context of code in a replica; without an engine, of code outside of the replicas.

        Args:
            engine: executes the replica.
            means: as in `Context`.
            true_rows: as in `Context`.
        """
        replica = None if engine is None else self.replica(engine)
        return Context(self._owner, replica, means=means, true_rows=true_rows)

    def replica(self, engine: ReplicaEngine) -> ReplicaContext:
        """Return the replica that an engine executes."""
        return ReplicaContext(self._owner, engine)

    @property
    def _owner(self) -> Any:
        return self if self.owner is None else self.owner

    def __repr__(self) -> str:
        return (
            f"Replicas({', '.join(map(str, self.mesh.devices))})" if self.owner is None else repr(self.owner)
        )

    def same_on_all(
        self, values: PyTree, what: str, known: Sequence[bool], key: object, batch: PyTree = None
    ) -> PyTree:
        """Return the first process' values on every process: once for each call of `fit`, else once.

        Args:
            values: pytree of arrays with which a step is about to begin.
            what: the step: one may begin with what it ended with the last time.
            known: for each array, whether it is what the step ended with.
            key: which step that was, the same on processes that took the same steps.
            batch: what the step begins with, the same on all processes; pytree of host arrays.

        Returns:
            The values; None where they are what the last step of all processes ended with.
        """
        if what in self._begun:
            return None if all(known) else values
        self._begun.add(what)
        leaves, structure = jax.tree.flatten(values)
        rows = None if batch is None else jax.tree.leaves(batch)
        shared = self.process_group.equal_arrays(
            leaves, known, (what, key), "The variables of the model", rows
        )
        return None if shared is None else jax.tree.unflatten(structure, shared)

    def begin_again(self, what: str) -> None:
        """Let the next step begin with the first process' values.

        Args:
            what: the step, as in `same_on_all`.
        """
        self._begun.discard(what)
