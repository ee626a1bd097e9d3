"""Replicas of several devices that train apart: rows of replicas, in parts on the devices of each.

What a replica has of a weight lies on its devices as the weight does in the layout below, and so do the slots
of the inner optimizer, and the outer one's. An exchange reduces parts.

Tests: tests/virtual/strategies/test_local_updates_of_grids.py; of several processes
tests/virtual/strategies/test_local_grid_workers.py, which tests/cluster/test_contract.py starts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
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
from unisono.model_parallel._cut_layout import CutLayout, CutStateLayout
from unisono.model_parallel._replica_grid import ReplicaGrid
from unisono.model_parallel._spanning_layout import SpannedParts, SpanningLayout
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
        lies: how the shared value lies, and each row on its replica.
    """

    lies: CutLayout

    @property
    def cut(self) -> PartitionSpec:
        """The mesh axis along which each of its axes is cut."""
        return self.lies.cut

    @property
    def sharding(self) -> Any:
        mesh = self.mesh.mesh
        return NamedSharding(mesh, self.cut), NamedSharding(mesh, _rows_of(self.cut))

    def begun(self, value: Any) -> jax.Array:
        return self.lies.place(value)

    def hold(self, array: Any) -> Any:
        return self.lies.hold(array[0])

    def enter(self, array: Any, in_replica: bool) -> Any:
        return jax.lax.with_sharding_constraint(super().enter(array, in_replica), self.cut)


@dataclasses.dataclass(frozen=True)
class CutRowsLayout(SpanningLayout):
    """How an inner optimizer's variable lies: a row on each replica, in parts on its devices.

    Args:
        cut: the mesh axis along which each axis is cut; rows lie along the first one, the replicas'.
        shape: of all rows.
    """

    shape: tuple[int, ...] = dataclasses.field(kw_only=True)

    @property
    def is_spanned(self) -> bool:
        """True if devices of several processes have the parts of a row."""
        return self.mesh.processes_per_replica > 1 and self.axis is not None

    @property
    def is_gathered_for_file(self) -> bool:  # type: ignore[override]
        """True if the first worker has not the whole row of the first replica, which a file has."""
        return self.is_spanned

    @property
    def axis(self) -> int | None:
        return next((i for i, name in enumerate(self.cut) if name and i > 0), None)

    @property
    def spec(self) -> PartitionSpec:
        return SHARDED

    def hold(self, array: jax.Array) -> Any:
        """Return the array; of several workers, each of which has rows of its replicas, a handle of it."""
        return super().hold(array) if self.mesh.spans_processes else array

    def assigned(self, array: jax.Array) -> VariableValue:
        if self.mesh.spans_processes:
            return super().assigned(array)
        parts: jax.Array = jax.device_put(array, self.sharding, may_alias=False)
        return parts

    def begun(self, first: VariableValue) -> VariableValue:
        """Return the value of a variable of which each replica begins with the same row."""
        cut = PartitionSpec(*self.cut[1:])
        lies = CutLayout(self.mesh, cut)
        if self.is_spanned:
            lies = SpanningLayout(self.mesh, cut, group=self.group)
        shared = lies.place(first)
        # Each device makes its own part of a row: no message, and no program for each shape.
        own = [jax.device_put(np.asarray(s.data)[None], s.device) for s in shared.addressable_shards]
        rows: VariableValue = self.hold(
            jax.make_array_from_single_device_arrays(self.shape, self.sharding, own)
        )
        return rows

    def enter(self, array: jax.Array, in_replica: bool) -> jax.Array:
        row: jax.Array = jax.lax.with_sharding_constraint(array[0], PartitionSpec(*self.cut[1:]))
        return row

    def leave(self, value: jax.Array, in_replica: bool) -> jax.Array:
        return jnp.asarray(value)[None]

    def to_file(self, variable: keras.Variable) -> np.ndarray:
        """Return the row of the first replica, which the first of several workers has, or they gathered."""
        held: Any = stored_value(variable)
        if self.is_spanned:
            first: np.ndarray = np.asarray(held)[0]
            return first
        shards = (held.array if isinstance(held, SpannedParts) else self.place(held)).addressable_shards
        row = np.empty(self.shape[1:], held.dtype)
        for shard in shards:
            if not shard.index[0].start:
                row[shard.index[1:]] = np.asarray(shard.data)[0]
        return row

    def from_file(self, saved: np.ndarray) -> np.ndarray:
        return fitted_rows(self.shape, saved)


def rows_of_grid(mesh: ReplicaMesh, group: ProcessGroup, rows: Sequence[Any]) -> list[Any]:
    """Return rows of replicas, in parts on the devices of each, as values that a backup reads.

    Args:
        mesh: the devices of all replicas.
        rows: arrays of a program; what is on the host stays there.
    """

    def held(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        lies: Any = x.sharding
        return CutRowsLayout(mesh, lies.spec, group=group, shape=x.shape).hold(x)  # type: ignore[arg-type]

    return list(map(held, rows))


@dataclasses.dataclass(frozen=True)
class FittedCutLayout(CutLayout):
    """How a slot of the only replica lies: in parts as its weight, and of saved rows the first.

    Args:
        shape: of the slot.
    """

    shape: tuple[int, ...] = ()

    def from_file(self, saved: np.ndarray) -> np.ndarray:
        return first_row(self.shape, saved)


@dataclasses.dataclass(frozen=True)
class FittedSpanningLayout(SpanningLayout):
    """The same of a slot whose parts lie on devices of several processes.

    Args:
        shape: of the slot.
    """

    shape: tuple[int, ...] = dataclasses.field(kw_only=True)

    def from_file(self, saved: np.ndarray) -> np.ndarray:
        return first_row(self.shape, saved)


def _fitted(lies: CutLayout, shape: Sequence[int]) -> CutLayout:
    """Return how a slot lies that is cut as its weight, and gets the first of saved rows."""
    if isinstance(lies, SpanningLayout):
        return FittedSpanningLayout(lies.mesh, lies.cut, group=lies.group, shape=tuple(shape))
    return FittedCutLayout(lies.mesh, lies.cut, tuple(shape))


class _OverParts(StateLayout):
    """The part of a layout of replicas that train apart which the layout below decides: it cuts weights."""

    _below: CutStateLayout

    @property
    def version(self) -> int:
        return self._below.version + self._version

    @property
    def is_whole(self) -> bool:
        return self._below.is_whole

    @property
    def keeps_weights(self) -> bool:
        return self._below.keeps_weights

    @property
    def needs_all(self) -> bool:
        return self._below.needs_all

    def of(self, variable: keras.Variable, is_stacked: bool = False) -> VariableLayout:
        weight = weight_of(variable)
        if weight is not None and not is_stacked:
            self._lie_for(variable, weight)
        return self._below.of(variable, is_stacked)

    def _lie_for(self, variable: keras.Variable, weight: keras.Variable) -> None:
        """Let an optimizer's variable lie as its weight, which may have been decided since it was made."""
        if any(cut := _cut_of(weight)):
            lie_as(variable, _fitted(self._below.cut_as(cut), variable.shape))

    def first(self, variable: keras.Variable, value: DeferredValue) -> Any:
        return self._below.first(variable, value)

    def given(self, variable: keras.Variable, value: jax.Array) -> VariableValue | None:
        return self._below.given(variable, value)

    def compiling(self, steps: int = 1) -> AbstractContextManager[object]:
        return self._below.compiling(steps)

    def decide(self, model: keras.Model, replicas: Replicas, task: TrainerTask, batch: PyTree) -> None:
        later = list(filter(self._below.decides_later, model.variables))
        self._below.decide(model, replicas, task, batch)
        # What a resumed run has placed before its first batch lies in other parts then.
        self._version += any(not self._below.decides_later(v) for v in later)

    def decide_step(self, plan: StatePlan, run: Callable[..., object], arrays: Sequence[Any]) -> bool:
        return self._below.decide_step(plan, run, arrays)


class LocalCutLayout(_OverParts, LocalLayout):
    """Replicas of several devices train apart, and exchange parts where a phase ends.

    Args:
        below: cuts the weights.
        mesh: the devices of all replicas.
        group: the processes that train together.
        sync: what the strategy was given.
        phases: of the strategy's models.
    """

    def __init__(
        self,
        below: CutStateLayout,
        mesh: ReplicaMesh,
        group: ProcessGroup,
        sync: LocalUpdates,
        phases: Phases,
    ) -> None:
        super().__init__(mesh, group, sync, phases)
        self._below = below
        if mesh.processes_per_replica > 1:
            # Of each replica as many as it has processes: each sends what its devices have.
            self.exchange_mesh = ReplicaGrid(self.exchange_mesh.devices, mesh.processes_per_replica)

    def pair(self, variable: keras.Variable, rule: Merge) -> PairLayout:
        cut = _cut_of(variable)
        if self._below.decides_later(variable):
            # As a checkpoint was read, until the first batch: never whole on a device.
            held: Any = stored_value(variable)
            held = held.array if isinstance(held, SpannedParts) else held
            sharding = getattr(held, "sharding", None)
            cut = sharding.spec if isinstance(sharding, NamedSharding) else cut
        return CutPairLayout(self._mesh, rule, self._below.cut_as(cut))

    def note_slot(self, variable: keras.Variable) -> None:
        """Give a variable of the inner optimizer a row for each replica, in parts as its weight."""
        note_weight(variable, new_slot_reference())
        layout = self._rows(variable.shape, _cut_of(weight_of(variable)))
        held = stored_value(variable)
        set_shape(variable, layout.shape)
        store_value(variable, layout.begun(held))
        lie_as(variable, layout)

    def _rows(self, shape: Sequence[int], cut: PartitionSpec) -> CutRowsLayout:
        """Return how rows of a shape lie of which each is cut alike."""
        rows = (self._mesh.num_replicas, *shape)
        return CutRowsLayout(self._mesh, _rows_of(cut), group=self._group, shape=rows)  # type: ignore[arg-type]

    def _lie_for(self, variable: keras.Variable, weight: keras.Variable) -> None:
        # By its shape: the layout below may have decided meanwhile how a slot of the weight's form lies.
        layout = self._rows(weight.shape, _cut_of(weight))
        if tuple(variable.shape) == layout.shape:
            lie_as(variable, layout)
        else:
            super()._lie_for(variable, weight)

    def gather(self, variables: Iterable[keras.Variable]) -> None:
        """Bring rows that lie on several workers to the host of each; see `StateLayout.gather`."""
        for held in map(stored_value, variables):
            if isinstance(held, SpannedParts):
                held.gather()

    def place(self, layouts: Sequence[VariableLayout], values: Sequence[Any]) -> list[Any]:
        """Return the arrays of a program; see `LocalLayout.place`."""
        pairs = [i for i, layout in enumerate(layouts) if isinstance(layout, PairLayout)]
        new = [i for i in pairs if not isinstance(values[i], tuple)]
        placed: dict[int, Any] = {}
        with self._group.dispatch():
            placed |= {i: _lying(layouts[i], values[i]) for i in pairs if i not in new}
        placed |= {i: layouts[i].place(values[i]) for i in range(len(layouts)) if i not in pairs}
        kinds: list[Any] = [layouts[i] for i in new]
        if new:
            shared = [one.begun(values[i]) for one, i in zip(kinds, new, strict=True)]
            made = _spread(self._mesh, tuple(one.rule for one in kinds), tuple(one.cut for one in kinds))
            with self._group.dispatch():
                rows = made(shared)
            placed |= {i: (s, r) for i, s, r in zip(new, shared, rows, strict=True)}
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

    def __init__(self, below: CutStateLayout, mesh: ReplicaMesh, sync: LocalUpdates, phases: Phases) -> None:
        super().__init__(mesh, sync, phases)
        self._below = below

    def note_slot(self, variable: keras.Variable) -> None:
        """Let a slot lie as its weight; of rows of several replicas in a file it gets the first."""
        note_weight(variable, new_slot_reference())
        lie_as(variable, _fitted(self._below.cut_as(_cut_of(weight_of(variable))), variable.shape))

    def gather(self, variables: Iterable[keras.Variable]) -> None:
        self._below.gather(variables)

    def place(self, layouts: Sequence[VariableLayout], values: Sequence[Any]) -> list[Any]:
        return self._below.place(layouts, values)


def _lying(layout: Any, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return a variable's shared value and rows where a program wants them, which may be in other parts."""
    (shared, rows), (shared_lies, rows_lie) = pair, layout.sharding
    return layout.mesh.put(shared, shared_lies), layout.mesh.put(rows, rows_lie)


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
