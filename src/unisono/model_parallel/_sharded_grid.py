"""State in parts on the replicas, of variables that the devices of each replica share already.

Each device of a replica has its elements of a variable, and holds the replica's part of these alone.

Tests: tests/virtual/strategies/test_sharded_grid.py.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import keras
from jax.sharding import PartitionSpec

from unisono._features import load
from unisono._types import PyTree
from unisono.collectives._process_group import ProcessGroup
from unisono.model_parallel._cut_layout import CutLayout, CutStateLayout, note_weight_of
from unisono.model_parallel._replica_grid import MODEL_AXIS, ReplicaGrid
from unisono.sharding._fully_sharded_layout import FullyShardedLayout, is_gathered
from unisono.sharding._gradients_in_parts import is_split
from unisono.sharding._sharded_layout import ShardedLayout
from unisono.sharding._shards import ShardedVariableLayout, lies_in_parts
from unisono.step._keras_internals import trained_variables
from unisono.step._layout import (
    GradientReducer,
    Gradients,
    PureUpdate,
    VariableLayout,
    is_added,
    is_slot,
    lie_as,
    lie_whole,
    own_layout,
)
from unisono.step._value_handle import DeferredValue, VariableValue
from unisono.step.variables._weights_of_slots import weight_of
from unisono.training.trainer._trainer_step import TrainerTask

if TYPE_CHECKING:
    from unisono.step._functional import StatePlan
    from unisono.step._replicas import Replicas


class ShardedCutLayout(ShardedLayout):
    """Optimizer variables of the shape of a weight lie in parts of the weight's parts.

    Args:
        mesh: the devices of all replicas.
        group: the processes that train together.
        cuts: how the devices of a replica share each weight.
    """

    def __init__(self, mesh: ReplicaGrid, group: ProcessGroup, cuts: CutStateLayout) -> None:
        super().__init__(mesh, group)
        self._cuts = cuts
        #: Optimizers of weights of which it is not known yet how they are cut.
        self._waiting: weakref.WeakSet[keras.Optimizer] = weakref.WeakSet()

    @property
    def of_replica(self) -> CutStateLayout:
        """How the devices of a replica share each weight."""
        return self._cuts

    @property
    def keeps_weights(self) -> bool:
        """True if each process has all weights between steps."""
        return super().keeps_weights and self._cuts.keeps_weights

    def of(self, variable: keras.Variable, is_stacked: bool = False) -> VariableLayout:
        """Return how a variable lies; see `StateLayout.of`."""
        layout = super().of(variable, is_stacked)
        return self._cuts.of(variable, is_stacked) if layout is self._whole else layout

    def place(self, layouts: Sequence[VariableLayout], values: Sequence[VariableValue]) -> list[jax.Array]:
        """Return the arrays that a program takes; see `StateLayout.place`."""
        if self._cuts.needs_all:
            values = load("parts of parts across processes")(layouts, values)
        return self._cuts.place(layouts, values)

    def _axis_of(self, variable: keras.Variable) -> int | None:
        """Return along which axis a replica's devices share a weight, or an optimizer's variable for it."""
        weight = weight_of(variable) if is_slot(variable) else variable
        layout: Any = None if weight is None else own_layout(weight)
        if not isinstance(layout, (CutLayout, ShardedVariableLayout)) or layout.mesh is not self._mesh:
            return None
        return layout.axis

    # --- new variables --------------------------------------------------------------------------------

    def first(self, variable: keras.Variable, value: DeferredValue) -> Any:
        """Return the parts with which a variable begins; see `StateLayout.first`."""
        weight = note_weight_of(variable) if is_slot(variable) else variable
        if weight is None or self._cuts.decides_later(weight):
            return self._cuts.first(variable, value)
        if weight is variable:
            self._cuts.lay(variable)
        held = super().first(variable, value)
        return held if is_slot(variable) or lies_in_parts(variable) else self._cuts.begin(variable, value)

    def given(self, variable: keras.Variable, value: jax.Array) -> VariableValue | None:
        """Return the parts of a value that a new variable was given; see `StateLayout.given`."""
        if self._cuts.decides_later(variable):
            return self._cuts.given(variable, value)
        self._cuts.lay(variable)
        layout = self._first_layout(variable) if self._mesh.num_replicas > 1 else None
        return self._cuts.given(variable, value) if layout is None else layout.divided(value)

    def note_slot(self, variable: keras.Variable) -> None:
        """Note the weight of an optimizer's variable; see `StateLayout.note_slot`."""
        self._cuts.note_slot(variable)

    def decide(self, model: keras.Model, replicas: Replicas, task: TrainerTask, batch: PyTree) -> None:
        """Decide how a model's weights lie, before a program is made; see `StateLayout.decide`."""
        later = list(filter(self._cuts.decides_later, model.variables))
        self._cuts.decide(model, replicas, task, batch)
        self._adopt(later)

    def decide_step(self, plan: StatePlan, run: Callable[..., object], arrays: Sequence[Any]) -> bool:
        """Decide how the variables of a step of `run` lie; see `StateLayout.decide_step`."""
        later = list(filter(self._cuts.decides_later, plan.variables))
        changed = self._cuts.decide_step(plan, run, arrays)
        self._adopt(later)
        return changed

    def compiling(self, steps: int = 1) -> AbstractContextManager[object]:
        """Surround the first start of a program; see `StateLayout.compiling`."""
        return self._cuts.compiling(steps)

    def _adopt(self, variables: Iterable[keras.Variable]) -> None:
        """Let variables lie in parts of which it may be known now how they are cut."""
        for optimizer in list(self._waiting):
            self.prepare(optimizer)

    # --- updates --------------------------------------------------------------------------------------

    def prepare(self, optimizer: keras.Optimizer | None, variables: Sequence[keras.Variable] = ()) -> bool:
        """Mark the variables that lie in parts, once for each optimizer; see `StateLayout.prepare`."""
        if optimizer is None or not optimizer.built:
            return False
        if any(map(self._cuts.decides_later, trained_variables(optimizer))):
            self._waiting.add(optimizer)
            return self._cuts.prepare(optimizer, variables)
        self._waiting.discard(optimizer)
        return super().prepare(optimizer, variables) or self._cuts.prepare(optimizer, variables)

    def update(
        self,
        optimizer: keras.Optimizer,
        values: Sequence[Any],
        weights: Sequence[jax.Array],
        aggregate: Callable[[GradientReducer | None], Gradients],
        apply: PureUpdate,
    ) -> tuple[list[jax.Array], list[jax.Array]] | None:
        """Update this replica's part of everything; see `StateLayout.update`."""
        is_whole = not self._in_parts.get(optimizer, True)
        new = None if is_whole else super().update(optimizer, values, weights, aggregate, apply)
        if new is not None or any(lies_in_parts(v) and not is_added(v) for v in optimizer.variables):
            return new
        return self._cuts.update(optimizer, values, weights, aggregate, apply)

    def _why_whole(self, optimizer: keras.Optimizer) -> str | None:
        """Return why an optimizer's variables do not lie in parts, or None."""
        by_shape: dict[tuple[int, ...], list[keras.Variable]] = {}
        for weight in trained_variables(optimizer):
            by_shape.setdefault(tuple(weight.shape), []).append(weight)
        for slot in optimizer.variables:
            weights = by_shape.get(tuple(slot.shape), [])
            if not weights or not is_split(slot.shape) or is_added(slot) or weight_of(slot) is not None:
                continue
            if len(set(map(self._axis_of, weights))) > 1:
                return f"it is not known to which weight {slot.path!r} belongs"
            # Any of them: they are cut alike.
            note_weight_of(slot, weights[0])
        return super()._why_whole(optimizer)

    def _unmark_weights(self, optimizer: keras.Optimizer) -> None:
        """Let weights, and the optimizer's variables for them, lie as they are cut."""
        own = itertools.filterfalse(is_added, optimizer.variables)
        for variable in (*trained_variables(optimizer), *own):
            axis = self._axis_of(variable)
            if axis is not None:
                lie_as(variable, self._cuts.cut_as(PartitionSpec(*[None] * axis, MODEL_AXIS)))
            elif lies_in_parts(variable):
                lie_whole(variable)
        self._version += 1


class FullyShardedCutLayout(ShardedCutLayout, FullyShardedLayout):
    """Weights lie in parts of their parts, too, and are gathered from the replicas where a step uses them."""

    def __init__(self, mesh: ReplicaGrid, group: ProcessGroup, cuts: CutStateLayout) -> None:
        super().__init__(mesh, group, cuts)
        cuts.notes_whole = False

    def _adopt(self, variables: Iterable[keras.Variable]) -> None:
        for variable in variables:
            is_weight = variable.trainable and not is_slot(variable) and is_gathered(variable)
            if is_weight and not self._cuts.decides_later(variable):
                lie_as(variable, self._as_weight(variable))
        super()._adopt(variables)


def sharded_cut_layout(
    name: str, mesh: ReplicaGrid, group: ProcessGroup, cuts: CutStateLayout
) -> ShardedCutLayout:
    """Return the layout of a `state_layout` for replicas of several devices.

    Args:
        name: `"sharded"` or `"fully_sharded"`.
        mesh: the devices of all replicas.
        group: the processes that train together.
        cuts: how the devices of a replica share each weight.
    """
    kind = FullyShardedCutLayout if name == "fully_sharded" else ShardedCutLayout
    return kind(mesh, group, cuts)
