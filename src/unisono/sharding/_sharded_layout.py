"""Optimizer state in equal parts, one on each replica, and the update of weights that goes with it.

Gradients are reduce-scattered, so that each replica gets the sum of its own part of them. It updates its part
of the optimizer's variables and of the weights, and an all-gather makes the weights whole again. A part is
a run of a variable's elements in row-major order, filled up with zeros to equal lengths: of `size`
elements each of `n` replicas holds `ceil(size / n)`.

Source: Xu et al., "Automatic cross-replica sharding of weight update in data-parallel training", 2020
(https://arxiv.org/abs/2004.13336).

Tests: tests/virtual/strategies/test_sharded_state.py.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax

from unisono._mesh import AXIS, ReplicaMesh
from unisono._values import ReduceOp
from unisono.collectives._packing import PackingPlan, pack, plan, unpack
from unisono.collectives._process_group import ProcessGroup
from unisono.sharding._elementwise import why_whole
from unisono.sharding._gather_on_use import part_of
from unisono.sharding._gradients_in_parts import asking_all, is_split
from unisono.sharding._shards import ShardedVariableLayout, Shards, WholeLayout, lies_in_parts, on_devices
from unisono.step._keras_internals import of_shapes, stored_value, trained_variables
from unisono.step._layout import (
    GradientReducer,
    Gradients,
    PureUpdate,
    StateLayout,
    VariableLayout,
    is_added,
    is_slot,
    lie_as,
    own_layout,
)
from unisono.step._value_handle import ValueHandle, VariableValue, whole_value

if TYPE_CHECKING:
    from unisono.step._value_handle import DeferredValue

_LOG = logging.getLogger("unisono")


def updated_parts(
    apply: PureUpdate,
    optimizer: keras.Optimizer,
    values: Sequence[Any],
    grads: Gradients,
    weights: Sequence[jax.Array],
    shape_of: Callable[[keras.Variable, Shards], tuple[int, ...]] = lambda _, held: held.parts.shape,
) -> tuple[list[jax.Array], list[Any]]:
    """Return what an optimizer's update makes of a replica's parts of its variables, and of weights.

    Args:
        values: of the optimizer's variables; its new values lie in parts where these do.
        shape_of: the shape in which the update gets a variable's part.
    """
    pairs = zip(optimizer.variables, values, strict=True)
    shapes = {i: shape_of(v, x) for i, (v, x) in enumerate(pairs) if isinstance(x, Shards)}
    given = [x.parts.reshape(shapes[i]) if i in shapes else x for i, x in enumerate(values)]
    with of_shapes([(optimizer.variables[i], shape) for i, shape in shapes.items()]):
        new, kept = apply(given, grads, list(weights))
    left = [
        Shards(k.reshape(-1), values[i].layout, in_replica=True) if i in shapes else k
        for i, k in enumerate(kept)
    ]
    return list(new), left


class PartsLayout(StateLayout):
    """Variables with a `ShardedVariableLayout` lie so; everything else on every device."""

    def __init__(self, mesh: ReplicaMesh, group: ProcessGroup) -> None:
        super().__init__(mesh)
        self._group = group
        self._whole = WholeLayout(mesh)

    @property
    def is_whole(self) -> bool:
        return False

    @property
    def needs_all(self) -> bool:
        return self._group.size > 1

    def of(self, variable: keras.Variable, is_stacked: bool = False) -> VariableLayout:
        """Return how a variable lies; see `StateLayout.of`."""
        layout = own_layout(variable)
        if isinstance(layout, ShardedVariableLayout) and layout.mesh is self._mesh and not is_stacked:
            return layout
        return super().of(variable, is_stacked)

    def place(self, layouts: Sequence[VariableLayout], values: Sequence[Any]) -> list[jax.Array]:
        """Return the arrays that a program takes; see `StateLayout.place`."""
        whole = [i for i, layout in enumerate(layouts) if not isinstance(layout, ShardedVariableLayout)]
        arrays = self._mesh.put([whole_value(values[i]) for i in whole], self._mesh.replicated)
        placed = dict(zip(whole, arrays, strict=True))
        return [
            placed[i] if i in placed else layout.place(value)
            for i, (layout, value) in enumerate(zip(layouts, values, strict=True))
        ]

    def gather(self, variables: Iterable[keras.Variable]) -> None:
        """Bring what lies in parts to the host of every worker; see `StateLayout.gather`."""
        for variable in variables:
            held = stored_value(variable)
            if isinstance(held, ValueHandle):
                held.gather()


class ShardedLayout(PartsLayout):
    """Optimizer variables of the shape of a weight lie in parts; everything else on every device."""

    name = "sharded"

    def __init__(self, mesh: ReplicaMesh, group: ProcessGroup) -> None:
        super().__init__(mesh, group)
        #: By optimizer: whether any of its variables lies in parts.
        self._in_parts: weakref.WeakKeyDictionary[keras.Optimizer, bool] = weakref.WeakKeyDictionary()

    def first(self, variable: keras.Variable, value: DeferredValue) -> ValueHandle | None:
        """Return the parts with which a variable begins that lies in parts; see `StateLayout.first`."""
        layout = self._first_layout(variable) if self._mesh.num_replicas > 1 else None
        if layout is None:
            return None
        if not self._mesh.spans_processes:
            return layout.hold(layout.place(value))
        # Several workers begin with the first one's values: they are made where all know its seed.
        return value.lying(layout.divided) if value.is_repeatable else None

    def _first_layout(self, variable: keras.Variable) -> ShardedVariableLayout | None:
        """Return how a variable begins; the optimizer's decides later how it lies."""
        return self._in_parts_of(variable) if is_slot(variable) else None

    def _in_parts_of(self, variable: keras.Variable) -> ShardedVariableLayout | None:
        """Return how a weight or an optimizer's variable lies in parts; None for one that stays whole."""
        shape = tuple(variable.shape)
        if not is_split(shape):
            return None
        return ShardedVariableLayout(self._mesh, shape, self._group, self._axis_of(variable))

    def _axis_of(self, variable: keras.Variable) -> int | None:
        """Return along which axis a replica's devices share a variable; here a replica has one device."""
        return None

    def prepare(self, optimizer: keras.Optimizer | None, variables: Sequence[keras.Variable] = ()) -> bool:
        """Mark the variables that lie in parts, once for each optimizer; whether there are any."""
        if optimizer is None or not optimizer.built or self._mesh.num_replicas == 1:
            return False
        if optimizer not in self._in_parts:
            self._in_parts[optimizer] = self._mark(optimizer)
        return self._in_parts[optimizer]

    def holds_parts(self, optimizer: keras.Optimizer) -> bool:
        """Say if each replica updates its part of the weights that an optimizer trains."""
        return self._in_parts.get(optimizer, False)

    def _mark(self, optimizer: keras.Optimizer) -> bool:
        reason = self._why_whole(optimizer)
        if reason is not None:
            _LOG.warning(
                'The optimizer %s keeps its state whole on every device, despite state_layout="%s": %s.',
                optimizer.name,
                self.name,
                reason,
            )
            self._unmark_weights(optimizer)
            return False
        self._mark_weights(optimizer)
        # By shape: Keras' optimizers do not say which of their variables belong to a weight.
        shapes = {tuple(v.shape) for v in trained_variables(optimizer)}
        # What another layout has added, whose shape may be that of a weight by chance, lies as it says.
        for variable in itertools.filterfalse(is_added, optimizer.variables):
            layout = self._in_parts_of(variable) if tuple(variable.shape) in shapes else None
            if layout is not None:
                lie_as(variable, layout)
        return any(map(lies_in_parts, [*optimizer.variables, *trained_variables(optimizer)]))

    def _why_whole(self, optimizer: keras.Optimizer) -> str | None:
        """Return why an optimizer's variables stay whole, or None where they lie in parts."""
        return why_whole(optimizer)

    def _mark_weights(self, optimizer: keras.Optimizer) -> None:
        """Let weights lie in parts, too; here none."""

    def _unmark_weights(self, optimizer: keras.Optimizer) -> None:
        """Let weights lie whole that lay in parts before it was known how they are trained; here none."""

    def update(
        self,
        optimizer: keras.Optimizer,
        values: Sequence[Any],
        weights: Sequence[jax.Array],
        aggregate: Callable[[GradientReducer | None], Gradients],
        apply: PureUpdate,
    ) -> tuple[list[jax.Array], list[jax.Array]] | None:
        """Update this replica's part of everything, and make the weights whole; see `StateLayout.update`."""
        trained, slots = trained_variables(optimizer), list(optimizer.variables)
        if len(weights) != len(trained) or len(values) != len(slots):
            # Keras says what must hold.
            return None
        # In a stateless scope of the user the values are others; they may also be whole.
        held = [value for v, value in zip(slots, values, strict=True) if lies_in_parts(v)]
        is_ours = all(isinstance(value, Shards) and value.in_replica for value in held)
        if not is_ours or (not held and all(part_of(weight) is None for weight in weights)):
            return None
        layouts = [self._in_parts_of(v) for v in trained]
        grads = [_own(layout, g) for layout, g in zip(layouts, aggregate(self._reduce), strict=True)]
        own = [_own(layout, w) for layout, w in zip(layouts, weights, strict=True)]
        pairs = [(v, (one.part_size,)) for v, one in zip(trained, layouts, strict=True) if one is not None]
        with of_shapes(pairs), asking_all(optimizer):
            new, left = updated_parts(apply, optimizer, values, grads, own)
        return self._whole_weights(trained, layouts, new), left

    @property
    def _has_reduce_scatter(self) -> bool:
        """Whether XLA's own is used: over Gloo it returns wrong numbers.

        See https://github.com/jax-ml/jax/issues/40830.
        """
        return self._mesh.platform != "cpu"

    def _reduce(
        self, op: ReduceOp, grads: list[jax.Array], variables: Sequence[keras.Variable]
    ) -> list[VariableValue]:
        """Reduce-scatter gradients; scalars are all-reduced, as every replica updates them."""
        layouts = [self._in_parts_of(v) for v in variables]
        divided = [one for one in layouts if one is not None]
        divisor = self._mesh.num_replicas if op is ReduceOp.MEAN else 1

        def scattered(grads: list[jax.Array]) -> list[jax.Array]:
            rows = [one.of_device.rows(g) for one, g in zip(divided, grads, strict=True)]
            return [(x / divisor).astype(g.dtype) for x, g in zip(self._scattered(rows), grads, strict=True)]

        specs = [one.cut for one in divided], [one.part_cut for one in divided]
        given = [g for one, g in zip(layouts, grads, strict=True) if one is not None]
        parts = iter(on_devices(self._mesh, scattered, (specs[0],), specs[1])(given))
        return [
            (lax.psum(g, AXIS) / divisor).astype(g.dtype)
            if layout is None
            else Shards(next(parts), layout, True)
            for layout, g in zip(layouts, grads, strict=True)
        ]

    def _scattered(self, rows: list[jax.Array]) -> list[jax.Array]:
        """Sum arrays of shape `(replicas, n)` over the replicas; each gets its row."""
        if not rows:
            return []
        packing = self._packing([(r.shape[1:], r.dtype) for r in rows])
        buckets = jax.vmap(lambda each: pack(each, packing))(rows)
        if self._has_reduce_scatter:
            summed = [lax.psum_scatter(b, AXIS) for b in buckets]
        else:
            # Without `dtype`, the sum of int8 or int16 would be an int32, as in NumPy.
            summed = [lax.all_to_all(b, AXIS, 0, 0).sum(axis=0, dtype=b.dtype) for b in buckets]
        return unpack(summed, packing)

    def _whole_weights(
        self,
        trained: Sequence[keras.Variable],
        layouts: Sequence[ShardedVariableLayout | None],
        weights: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """Make weights whole of all replicas' parts."""
        divided = [one for one in layouts if one is not None]

        def joined(parts: list[jax.Array]) -> list[jax.Array]:
            packing = self._packing([(p.shape, p.dtype) for p in parts])
            buckets = [lax.all_gather(b, AXIS) for b in pack(parts, packing)]
            rows = unpack(buckets, packing)
            return [one.of_device.joined(row) for one, row in zip(divided, rows, strict=True)]

        specs = [one.part_cut for one in divided], [one.cut for one in divided]
        parts = [w for one, w in zip(layouts, weights, strict=True) if one is not None]
        whole = iter(on_devices(self._mesh, joined, (specs[0],), specs[1])(parts))
        return [w if one is None else next(whole) for one, w in zip(layouts, weights, strict=True)]

    def _packing(self, arrays: Sequence[tuple[tuple[int, ...], np.dtype]]) -> PackingPlan:
        # A message between workers costs more than its bytes: all arrays of a type travel in one, on CPUs.
        # XLA's compilers for GPUs and TPUs combine what is to be sent themselves, see `own_ops`.
        return plan(arrays, num_packs=1 if self._sends_over_gloo else 0)

    @property
    def _sends_over_gloo(self) -> bool:
        return self.needs_all and self._mesh.platform == "cpu"


def _own(layout: ShardedVariableLayout | None, value: Any) -> Any:
    """This replica's part of a gradient or a weight."""
    if layout is None or value is None:
        return value
    part = value.parts if isinstance(value, Shards) else part_of(value)
    return layout.own_part(jnp.asarray(value)) if part is None else part
