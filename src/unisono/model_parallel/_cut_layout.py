"""Variables in parts on the devices of a replica, as a layout map says; XLA divides the computation.

Source: Shoeybi et al., "Megatron-LM", 2019 (https://arxiv.org/abs/1909.08053); Xu et al., "GSPMD", 2021
(https://arxiv.org/abs/2105.04663).

Tests: tests/virtual/strategies/test_replica_grid.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from unisono._errors import InvalidArgumentError
from unisono._features import load
from unisono._mesh import AXIS
from unisono._values import ReduceOp
from unisono.collectives._cross_device import CrossDeviceOps, reduce_in_step
from unisono.collectives._process_group import ProcessGroup, SingleProcessGroup
from unisono.model_parallel._first_values import made
from unisono.model_parallel._layout_review import LayoutReview, new_program, programs_of
from unisono.model_parallel._layout_rules import LayoutRule, check_axes, rule_of
from unisono.model_parallel._replica_grid import MODEL_AXIS, ReplicaGrid
from unisono.model_parallel._traced_model import forward_pass, rows_of_replica, shapes_of_plan, traced
from unisono.step._engines import UNSHARDED
from unisono.step._keras_internals import stored_value
from unisono.step._layout import (
    GradientReducer,
    Gradients,
    PureUpdate,
    StateLayout,
    Synchronization,
    VariableLayout,
    is_slot,
    lie_as,
    own_layout,
)
from unisono.step._value_handle import DeferredValue, ValueHandle, VariableValue, whole_value
from unisono.step.variables._weights_of_slots import note_weight, weight_of
from unisono.training._chief_save import new_slot_reference
from unisono.training.replica._step_reading import shapes_of
from unisono.training.trainer._trainer_step import TrainerTask

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

    from unisono._types import PyTree
    from unisono.step._functional import StatePlan
    from unisono.step._replicas import Replicas

_LOG = logging.getLogger("unisono")

#: The attribute of a weight that was in a step whose compiled program was read.
_REVIEWED = "_unisono_reviewed"

#: Bytes from which on a weight that is not cut is worth a warning.
LARGE = 64 * 10**6


@dataclasses.dataclass(frozen=True)
class CutLayout(VariableLayout):
    """How a variable lies on the devices of each replica: the same on all replicas.

    Args:
        mesh: the devices of all replicas.
        cut: the mesh axis along which each of its axes is cut.
    """

    mesh: ReplicaGrid
    cut: PartitionSpec = UNSHARDED

    @property
    def holds_arrays(self) -> bool:
        return True

    @property
    def axis(self) -> int | None:
        """The axis that the devices of a replica share; None for a whole variable."""
        return next((i for i, name in enumerate(self.cut) if name), None)

    @property
    def sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh.mesh, self.cut)

    def place(self, value: VariableValue) -> jax.Array:
        """Return the array that a program takes; see `VariableLayout.place`."""
        if isinstance(value, DeferredValue):
            return self.make(value)
        # A handle: what lay in parts on the replicas, too, when it was last written.
        placed: jax.Array = super().place(whole_value(value))
        return placed

    def make(self, value: DeferredValue) -> jax.Array:
        """Return a first value on all replicas: in one program, so that the whole is on no device."""
        if not self.mesh.spans_processes:
            return made(value, self.sharding)
        if self.mesh.processes_per_replica > 1:
            # Whole on each device: what is cut there is a `SpanningLayout`.
            whole: jax.Array = self.mesh.put(value.whole(), self.sharding)
            return whole
        lies = NamedSharding(self.mesh.mesh_of(self.mesh.local_replicas[0]), self.cut)
        return self.mesh.spread(made(value, lies), self.sharding)

    def assigned(self, array: jax.Array) -> VariableValue:
        """Return the parts of an array; see `VariableLayout.assigned`."""
        # The memory is the variable's own: a step donates it.
        if self.mesh.spans_processes:
            held: VariableValue = self.hold(self.mesh.put(np.array(array), self.sharding))
            return held
        parts: jax.Array = jax.device_put(self.place(array), may_alias=False)
        return parts

    def enter(self, array: jax.Array, in_replica: bool) -> jax.Array:
        return self.pinned(array, in_replica)

    def leave(self, value: jax.Array, in_replica: bool) -> jax.Array:
        return self.pinned(value, in_replica)

    def pinned(self, value: jax.Array, in_replica: bool) -> jax.Array:
        """Return a value of a program that lies so; else XLA chooses, and may gather weights for it."""
        # In a replica its own axis is not XLA's to choose, and the context has the mesh.
        lying: jax.Array = jax.lax.with_sharding_constraint(value, self.cut if in_replica else self.sharding)
        return lying


def note_weight_of(slot: keras.Variable, weight: keras.Variable | None = None) -> keras.Variable | None:
    """Note and return the weight to which an optimizer's variable of its shape belongs.

    Args:
        weight: None for that for which the optimizer makes the variable now.
    """
    weight = new_slot_reference() if weight is None else weight
    if weight is None:
        # Made in a step: its first value comes after the step, where the optimizer makes none.
        return weight_of(slot)
    if tuple(weight.shape) != tuple(slot.shape):
        return None
    note_weight(slot, weight)
    return weight


class CutStateLayout(StateLayout):
    """State in parts on the devices of each replica, and the same on all replicas.

    Args:
        mesh: the devices of all replicas.
        rule: how each variable lies.
        ops: how gradients are reduced.
        group: the processes that train together.
    """

    #: True if a user chose the axes.
    of_map = True

    def __init__(self, mesh: ReplicaGrid, rule: LayoutRule, ops: CrossDeviceOps, group: ProcessGroup) -> None:
        super().__init__(mesh)
        self._rule, self._ops = rule, ops
        #: By path: the bytes of weights that are not cut.
        self._whole_weights: dict[str, int] = {}
        #: True if a weight without a cut is whole on each device.
        self.notes_whole = True
        self._has_warned = False
        #: The step whose program is to be read, and the bytes that the axes of its weights should send.
        self._review: LayoutReview | None = None
        self._planned: int | None = None
        self._grid, self._group = mesh, group
        self._whole = CutLayout(mesh)

    @property
    def keeps_weights(self) -> bool:
        return not self.needs_all

    @property
    def needs_all(self) -> bool:
        return self._mesh.processes_per_replica > 1

    def cut_as(self, cut: PartitionSpec) -> CutLayout:
        """Return how a variable lies that is cut so."""
        if not self.needs_all or not any(cut):
            return CutLayout(self._grid, cut)
        spanning: CutLayout = load("layout of replicas across processes")(self._grid, cut, group=self._group)
        return spanning

    def gather(self, variables: Iterable[keras.Variable]) -> None:
        """Bring what lies in parts on several processes to the host of each; see `StateLayout.gather`."""
        for variable in variables if self.needs_all else ():
            held = stored_value(variable)
            if isinstance(held, ValueHandle) and held.needs_all:
                held.gather()

    def of(self, variable: keras.Variable, is_stacked: bool = False) -> VariableLayout:
        layout = own_layout(variable)
        if isinstance(layout, CutLayout) and layout.mesh is self._mesh and not is_stacked:
            return layout
        return super().of(variable, is_stacked)

    def first(self, variable: keras.Variable, value: DeferredValue) -> Any:
        """Return the parts with which a variable begins; see `StateLayout.first`."""
        self.lay(variable)
        return self.begin(variable, value)

    def given(self, variable: keras.Variable, value: jax.Array) -> VariableValue | None:
        """Return the parts of a value that a new variable was given; see `StateLayout.given`."""
        self.lay(variable)
        layout = own_layout(variable)
        return layout.assigned(value) if isinstance(layout, CutLayout) else None

    def note_slot(self, variable: keras.Variable) -> None:
        """Note the weight of an optimizer's variable, whose first value may be made later."""
        note_weight_of(variable)

    def lay(self, variable: keras.Variable) -> None:
        """Let a new variable lie as it is cut."""
        cut = self._cut_of(variable)
        if any(cut):
            lie_as(variable, self.cut_as(cut))

    def begin(self, variable: keras.Variable, value: DeferredValue) -> Any:
        """Return the parts with which a variable begins that lies as it is cut; None for a whole one."""
        layout = own_layout(variable)
        if not isinstance(layout, CutLayout):
            return None
        # Several workers begin with the first one's values: they are made where all know its seed.
        if self._mesh.spans_processes:
            return value.lying(layout.assigned) if value.is_repeatable else None
        return layout.make(value)

    def decides_later(self, variable: keras.Variable) -> bool:
        """Return whether it is not known yet how a weight lies."""
        return False

    def _cut_of(self, variable: keras.Variable) -> PartitionSpec:
        """Return how a new variable is cut."""
        if is_slot(variable):
            reference = note_weight_of(variable)
            layout = None if reference is None else own_layout(reference)
            return layout.cut if isinstance(layout, CutLayout) else UNSHARDED
        axes = self._rule(variable)
        if axes is None or not any(axes):
            self._note_whole(variable)
            return UNSHARDED
        check_axes(axes, variable, self._mesh.devices_per_replica)
        return PartitionSpec(*axes)

    def _note_whole(self, variable: keras.Variable) -> None:
        if variable.trainable and self.notes_whole:
            self._whole_weights[variable.path] = (
                math.prod(variable.shape) * jnp.dtype(variable.dtype).itemsize
            )

    def warn_of_whole(self) -> None:
        """Say once which patterns match no variable, and which large weights are whole on each device."""
        if self._has_warned:
            return
        self._has_warned = True
        if unused := self._rule.unused():
            _LOG.warning(
                "The pattern %r of `layout_map` matches no variable%s: what it should cut is whole on each "
                "device. A pattern must match a variable's whole path, such as %r.",
                unused[0],
                f", and {len(unused) - 1} more match none" if len(unused) > 1 else "",
                next(iter(self._whole_weights), "dense/kernel"),
            )
        if large := {p: n for p, n in self._whole_weights.items() if n >= LARGE}:
            path = max(large, key=large.__getitem__)
            _LOG.warning(
                "The weight %r of %d MB lies whole on each device, because `layout_map` does not cut it%s.",
                path,
                large[path] // 10**6,
                f", and {len(large) - 1} more" if len(large) > 1 else "",
            )

    # --- what the compiler says -----------------------------------------------------------------------

    def decide(self, model: keras.Model, replicas: Replicas, task: TrainerTask, batch: PyTree) -> None:
        """Note the model whose program will be compiled; see `StateLayout.decide`."""
        if task is TrainerTask.TRAIN:
            rows, variables = rows_of_replica(batch, replicas.num_replicas_in_sync), list(model.variables)
            self._expect(variables, lambda: forward_pass(model, variables, rows))

    def decide_step(self, plan: StatePlan, run: Callable[..., object], arrays: Sequence[Any]) -> bool:
        """Note the step whose program will be compiled; see `StateLayout.decide_step`."""
        if any(slot.written and slot.variable.trainable for slot in plan.slots):
            shapes = shapes_of_plan(plan, self._mesh.num_replicas)
            self._expect(plan.variables, lambda: traced(run, shapes, shapes_of(arrays)), has_gradients=True)
        return False

    def _expect(
        self, variables: list[keras.Variable], program: Callable[[], ClosedJaxpr], has_gradients: bool = False
    ) -> None:
        """Let the next program that is compiled be read, once for each model with much state in parts."""
        new = [v for v in variables if v.trainable and not hasattr(v, _REVIEWED)]
        for variable in new:
            object.__setattr__(variable, _REVIEWED, True)
        size = self._grid.devices_per_replica
        review = LayoutReview(size, variables, program, has_gradients, self.of_map, self._planned)
        self._review = review if new and review.is_worth_it else None

    @contextlib.contextmanager
    def compiling(self, steps: int = 1) -> Iterator[None]:
        """Read the program that is compiled in a block; see `StateLayout.compiling`."""
        review, self._review = self._review, None
        device = self._mesh.local_devices[0]
        known = [] if review is None else programs_of(device)
        yield
        if review is not None and (program := new_program(known, device)) is not None:
            review.warn(program, steps)

    def place(self, layouts: Sequence[VariableLayout], values: Sequence[VariableValue]) -> list[jax.Array]:
        self.warn_of_whole()
        return [layout.place(value) for layout, value in zip(layouts, values, strict=True)]

    def prepare(self, optimizer: keras.Optimizer | None, variables: Sequence[keras.Variable] = ()) -> bool:
        """Return True: gradients are reduced in the parts in which their weights lie."""
        return optimizer is not None and optimizer.built and self._mesh.num_replicas > 1

    def update(
        self,
        optimizer: keras.Optimizer,
        values: Sequence[jax.Array],
        weights: Sequence[jax.Array],
        aggregate: Callable[[GradientReducer | None], Gradients],
        apply: PureUpdate,
    ) -> tuple[list[jax.Array], list[jax.Array]] | None:
        # Replicas of uneven batches run one after the other, on no mesh: their gradients meet elsewhere.
        if self._mesh.num_replicas == 1 or jax.sharding.get_abstract_mesh().empty:
            return None
        return apply(list(values), aggregate(self._reduce), list(weights))

    def _reduce(
        self, op: ReduceOp, grads: list[jax.Array], variables: Sequence[keras.Variable]
    ) -> list[jax.Array]:
        """Reduce gradients over the replicas, part by part: to pack whole ones, XLA would gather them."""
        layouts = map(self.of, variables)
        lies = [one.cut if isinstance(one, CutLayout) else UNSHARDED for one in layouts]

        def parts(grads: list[jax.Array]) -> list[jax.Array]:
            return reduce_in_step(self._ops, op, grads, axis_name=AXIS, axis_size=self._mesh.num_replicas)

        in_parts = jax.shard_map(
            parts, in_specs=(lies,), out_specs=lies, axis_names={MODEL_AXIS}, check_vma=False
        )
        return in_parts(grads)


def cut_layout(
    mesh: ReplicaGrid,
    layout_map: object,
    ops: CrossDeviceOps,
    state_layout: str = "mirrored",
    sync: Synchronization | None = None,
    group: ProcessGroup | None = None,
) -> StateLayout:
    """Return the layout of replicas of several devices.

    Args:
        mesh: the devices of all replicas.
        layout_map: as in the strategies.
        ops: how gradients are reduced between replicas.
        state_layout: as in the strategies.
        sync: as in the strategies.
        group: the processes that train together; this one alone by default.

    Raises:
        InvalidTypeError: `layout_map` is of another type.
        InvalidArgumentError: it is for another number of devices.
    """
    if mesh.devices_per_replica == 1:
        raise InvalidArgumentError(
            "`layout_map` cuts variables over the devices of a replica. Received: a map, and replicas of one "
            "device. Write `devices_per_replica=2`, for example, or leave the map out."
        )
    group = group or SingleProcessGroup()
    if layout_map is None or layout_map == "auto":
        cuts: CutStateLayout = load("layout by a model's program")(mesh, ops, group)
    else:
        cuts = CutStateLayout(mesh, rule_of(layout_map, mesh.devices_per_replica), ops, group)
    layout: StateLayout = cuts
    # One replica has no others to share its state with.
    if state_layout != "mirrored" and (mesh.num_replicas > 1 or sync is not None):
        # Says where the part is absent on which both layouts are built.
        load("fully sharded layout")
        layout = load("state in parts of several devices")(state_layout, mesh, group, cuts)
    layout = ops._layout(layout, mesh, group)
    return layout if sync is None else sync._layout(layout, mesh, group)
