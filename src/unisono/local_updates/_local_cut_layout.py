"""Replicas of several devices that train apart: rows of replicas, in parts on the devices of each.

What a replica has of a weight lies on its devices as the weight does in the layout below, and so do the slots
of the inner optimizer, and the outer one's. An exchange reduces parts.

Tests: tests/virtual/strategies/test_local_updates_of_grids.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from unisono._mesh import AXIS, ReplicaMesh
from unisono._types import PyTree
from unisono.collectives._cross_device import own_ops
from unisono.collectives._process_group import ProcessGroup
from unisono.local_updates._local_layout import (
    LocalLayout,
    LoneLayout,
    PairLayout,
    first_row,
    fitted_rows,
)
from unisono.model_parallel._cut_layout import CutLayout
from unisono.step._engines import SHARDED, UNSHARDED, SpmdEngine
from unisono.step._keras_internals import of_shapes, set_shape, store_value, stored_value
from unisono.step._layout import (
    GradientReducer,
    Gradients,
    Phases,
    PureUpdate,
    ReplicaCode,
    StateLayout,
    VariableLayout,
    lie_as,
    own_layout,
)
from unisono.step._value_handle import whole_value
from unisono.step.variables._merge_rules import Merge, localize
from unisono.step.variables._weights_of_slots import note_weight, weight_of
from unisono.training._chief_save import new_slot_reference

if TYPE_CHECKING:
    from unisono.local_updates._local_updates import LocalUpdates
    from unisono.step._functional import StatePlan
    from unisono.step._replicas import Replicas
    from unisono.step._value_handle import DeferredValue, VariableValue
    from unisono.training.trainer._trainer_step import TrainerTask


def _cut_of(variable: keras.Variable | None) -> PartitionSpec:
    """Return how a variable lies on the devices of each replica."""
    layout = None if variable is None else own_layout(variable)
    return layout.cut if isinstance(layout, CutLayout) else UNSHARDED


def _rows_of(cut: PartitionSpec) -> PartitionSpec:
    """Return how rows lie, a row on each replica."""
    return PartitionSpec(AXIS, *cut)


@dataclasses.dataclass(frozen=True)
class CutPairLayout(PairLayout):
    """How a variable lies that replicas of several devices change apart.

    Args:
        cut: the mesh axis along which each of its axes is cut.
    """

    cut: PartitionSpec

    @property
    def sharding(self) -> Any:
        mesh = self.mesh.mesh
        return NamedSharding(mesh, self.cut), NamedSharding(mesh, _rows_of(self.cut))

    def enter(self, array: Any, in_replica: bool) -> Any:
        return jax.lax.with_sharding_constraint(super().enter(array, in_replica), self.cut)


@dataclasses.dataclass(frozen=True)
class CutRowsLayout(VariableLayout):
    """How an inner optimizer's variable lies: a row on each replica, in parts on its devices.

    Args:
        shape: of all rows.
        cut: the mesh axis along which each axis of a row is cut.
    """

    shape: tuple[int, ...]
    cut: PartitionSpec

    # A file of Keras has the first replica's row alone.
    is_gathered_for_file = False

    @property
    def spec(self) -> PartitionSpec:
        return SHARDED

    @property
    def sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh.mesh, _rows_of(self.cut))

    def hold(self, array: jax.Array) -> jax.Array:
        return array

    def assigned(self, array: jax.Array) -> jax.Array:
        parts: jax.Array = jax.device_put(array, self.sharding, may_alias=False)
        return parts

    def enter(self, array: jax.Array, in_replica: bool) -> jax.Array:
        row: jax.Array = jax.lax.with_sharding_constraint(array[0], self.cut)
        return row

    def leave(self, value: jax.Array, in_replica: bool) -> jax.Array:
        return jnp.asarray(value)[None]

    def to_file(self, variable: keras.Variable) -> np.ndarray:
        return np.asarray(stored_value(variable)[0])

    def from_file(self, saved: np.ndarray) -> np.ndarray:
        return fitted_rows(self.shape, saved)


@dataclasses.dataclass(frozen=True)
class FittedCutLayout(CutLayout):
    """How a slot of the only replica lies: in parts as its weight, and of saved rows the first.

    Args:
        shape: of the slot.
    """

    shape: tuple[int, ...] = ()

    def from_file(self, saved: np.ndarray) -> np.ndarray:
        return first_row(self.shape, saved)


class _OverParts(StateLayout):
    """The part of a layout of replicas that train apart which the layout below decides: it cuts weights."""

    _below: StateLayout

    @property
    def version(self) -> int:
        return self._below.version

    @property
    def is_whole(self) -> bool:
        return self._below.is_whole

    def of(self, variable: keras.Variable, is_stacked: bool = False) -> VariableLayout:
        weight = weight_of(variable)
        if weight is not None and not is_stacked:
            self._lie_for(variable, weight)
        layout = own_layout(variable)
        if isinstance(layout, CutRowsLayout) and not is_stacked:
            return layout
        return self._below.of(variable, is_stacked)

    def _lie_for(self, variable: keras.Variable, weight: keras.Variable) -> None:
        """Let an optimizer's variable lie as its weight, which may have been decided since it was made."""
        # By its shape: the layout below may have decided meanwhile how a slot of the weight's form lies.
        rows = (self._mesh.num_replicas, *weight.shape)
        if tuple(variable.shape) == rows:
            lie_as(variable, CutRowsLayout(self._mesh, rows, _cut_of(weight)))
        elif any(cut := _cut_of(weight)):
            lie_as(variable, FittedCutLayout(self._mesh, cut, tuple(variable.shape)))  # type: ignore[arg-type]

    def first(self, variable: keras.Variable, value: DeferredValue) -> Any:
        return self._below.first(variable, value)

    def given(self, variable: keras.Variable, value: jax.Array) -> VariableValue | None:
        return self._below.given(variable, value)

    def compiling(self, steps: int = 1) -> AbstractContextManager[object]:
        return self._below.compiling(steps)

    def decide(self, model: keras.Model, replicas: Replicas, task: TrainerTask, batch: PyTree) -> None:
        self._below.decide(model, replicas, task, batch)

    def decide_step(self, plan: StatePlan, run: Callable[..., object], arrays: Sequence[Any]) -> bool:
        return self._below.decide_step(plan, run, arrays)


class LocalCutLayout(_OverParts, LocalLayout):
    """Replicas of several devices train apart, and exchange parts where a phase ends.

    Args:
        below: cuts the weights.
        mesh: the devices of all replicas.
        group: this process alone.
        sync: what the strategy was given.
        phases: of the strategy's models.
    """

    def __init__(
        self,
        below: StateLayout,
        mesh: ReplicaMesh,
        group: ProcessGroup,
        sync: LocalUpdates,
        phases: Phases,
    ) -> None:
        super().__init__(mesh, group, sync, phases)
        self._below = below

    def pair(self, variable: keras.Variable, rule: Merge) -> PairLayout:
        return CutPairLayout(self._mesh, rule, _cut_of(variable))

    def note_slot(self, variable: keras.Variable) -> None:
        """Give a variable of the inner optimizer a row for each replica, in parts as its weight."""
        note_weight(variable, new_slot_reference())
        cut, rows = _cut_of(weight_of(variable)), (self._mesh.num_replicas, *variable.shape)
        layout = CutRowsLayout(self._mesh, rows, cut)
        held = whole_value(stored_value(variable))
        set_shape(variable, rows)
        store_value(
            variable, jax.jit(jnp.broadcast_to, static_argnums=1, out_shardings=layout.sharding)(held, rows)
        )
        lie_as(variable, layout)

    def place(self, layouts: Sequence[VariableLayout], values: Sequence[Any]) -> list[Any]:
        """Return the arrays of a program; see `LocalLayout.place`."""
        pairs = [i for i, layout in enumerate(layouts) if isinstance(layout, PairLayout)]
        new = [i for i in pairs if not isinstance(values[i], tuple)]
        placed = {i: values[i] for i in pairs}
        placed |= {i: layouts[i].place(values[i]) for i in range(len(layouts)) if i not in placed}
        kinds: list[Any] = [layouts[i] for i in new]
        if new:
            lies = [CutLayout(self._mesh, one.cut) for one in kinds]  # type: ignore[arg-type]
            shared = [one.place(values[i]) for one, i in zip(lies, new, strict=True)]
            made = _spread(self._mesh, tuple(one.rule for one in kinds), tuple(one.cut for one in kinds))
            placed |= {i: (s, r) for i, s, r in zip(new, shared, made(shared), strict=True)}
        return [placed[i] for i in range(len(layouts))]

    def update(
        self,
        optimizer: keras.Optimizer,
        values: Sequence[Any],
        weights: Sequence[jax.Array],
        aggregate: Callable[[GradientReducer | None], Gradients],
        apply: PureUpdate,
    ) -> tuple[list[jax.Array], list[jax.Array]] | None:
        """Update this replica's own weights by its own gradients; see `StateLayout.update`."""
        if not self.prepare(optimizer):
            return None
        return apply(list(values), aggregate(None), list(weights))

    def run_replica(
        self, variables: Sequence[keras.Variable], values: Sequence[Any], code: ReplicaCode
    ) -> tuple[PyTree, list[Any]]:
        """Run the code of a replica, which has one row of each of its optimizer's variables."""
        rows = [v for v in variables if isinstance(own_layout(v), CutRowsLayout)]
        with of_shapes([(v, tuple(v.shape)[1:]) for v in rows]):
            return code(list(values))


class LoneCutLayout(_OverParts, LoneLayout):
    """One replica of several devices, which holds what several need to continue from it.

    Args:
        below: cuts the weights.
        mesh: the devices of the replica.
        sync: what the strategy was given.
        phases: of the strategy's models.
    """

    def __init__(self, below: StateLayout, mesh: ReplicaMesh, sync: LocalUpdates, phases: Phases) -> None:
        super().__init__(mesh, sync, phases)
        self._below = below

    def note_slot(self, variable: keras.Variable) -> None:
        """Let a slot lie as its weight; of rows of several replicas in a file it gets the first."""
        note_weight(variable, new_slot_reference())
        shape, cut = tuple(variable.shape), _cut_of(weight_of(variable))
        lie_as(variable, FittedCutLayout(self._mesh, cut, shape))  # type: ignore[arg-type]

    def place(self, layouts: Sequence[VariableLayout], values: Sequence[Any]) -> list[Any]:
        return self._below.place(layouts, values)


@functools.lru_cache(maxsize=64)
def _spread(
    mesh: ReplicaMesh, rules: tuple[Merge, ...], cuts: tuple[PartitionSpec, ...]
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Return the program for rows of shared values."""
    engine = SpmdEngine(mesh.num_replicas, own_ops(mesh.platform))

    def rows(shared: list[jax.Array]) -> list[jax.Array]:
        return [localize(r, x, engine)[None] for r, x in zip(rules, shared, strict=True)]

    lies = [NamedSharding(mesh.mesh, _rows_of(cut)) for cut in cuts]
    return jax.jit(mesh.on_replicas(rows, UNSHARDED, SHARDED), out_shardings=lies)
