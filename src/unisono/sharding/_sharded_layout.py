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

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax

from unisono._context import current
from unisono._errors import ContextError
from unisono._mesh import AXIS, ReplicaMesh
from unisono._values import ReduceOp
from unisono.collectives._packing import PackingPlan, pack, plan, split_rows, unpack
from unisono.collectives._process_group import ProcessGroup
from unisono.sharding._elementwise import why_whole
from unisono.sharding._gather_on_use import part_of
from unisono.sharding._gradients_in_parts import asking_all, is_split
from unisono.step._engines import SHARDED
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
from unisono.step._value_handle import AgreedHandle, ValueHandle, VariableValue, different_values, whole_value

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from unisono.step._value_handle import DeferredValue

_LOG = logging.getLogger("unisono")


class Shards(AgreedHandle):
    """What a variable holds whose elements lie in parts on the replicas; becomes an array where it is read.

    Args:
        parts: flat array. Between steps, and outside of the replicas, of all parts; in a replica of its own.
        in_replica: whether `parts` is one replica's part, in `jax.shard_map`.
    """

    def __init__(self, parts: jax.Array, layout: ShardedVariableLayout, in_replica: bool = False) -> None:
        super().__init__(layout.shape, parts.dtype)
        self.parts, self.layout, self.in_replica = parts, layout, in_replica
        #: On the host; of several workers, one may then read the value alone.
        self._gathered: np.ndarray | None = None
        #: Zeros for what steps have left, which is the same for all workers; a checksum of what was assigned.
        self._token = np.zeros(2, np.uint32)

    @property
    def token(self) -> np.ndarray:
        """What is the same on all workers where these are parts of the same value."""
        return self._token

    def agreed(self, token: np.ndarray) -> Shards:
        """Return these parts, if they are of the value that the first worker has."""
        if not np.array_equal(token, self._token):
            raise different_values()
        return self

    def assigned(self, value: jax.Array) -> VariableValue:
        """Return the parts of another value; in a trace, that value."""
        if self.in_replica or isinstance(value, jax.core.Tracer):
            return value
        return self.layout.cut(value)

    def is_deleted(self) -> bool:
        """Whether a step was given the parts."""
        return self.parts.is_deleted()

    @property
    def needs_all(self) -> bool:
        is_here = self.in_replica or isinstance(self.parts, jax.core.Tracer) or self._gathered is not None
        return not is_here and not self.parts.is_fully_addressable

    def whole(self) -> jax.Array:
        """Return the variable's value as one array.

        Of several workers all must call it, as for a collective, unless they called `gather` before.
        """
        if self.in_replica:
            return self.layout.shaped(lax.all_gather(self.parts, AXIS, tiled=True))
        if isinstance(self.parts, jax.core.Tracer):
            return self.layout.shaped(self.parts)
        if self._gathered is not None:
            return jnp.asarray(self._gathered)
        return self.layout.gathered(self.parts)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if self._gathered is not None:
            return self._gathered.astype(dtype or self.dtype)
        if self.in_replica or isinstance(self.parts, jax.core.Tracer) or self.needs_all:
            return super().__array__(dtype, copy)
        # The host joins the parts: the whole is on no device.
        flat = np.asarray(self.parts)[: self.layout.size]
        return flat.reshape(self.shape).astype(dtype or self.dtype)

    def gather(self) -> None:
        """Bring the value to the host of every one of several workers; all must call it."""
        if self.needs_all:
            self._gathered = np.asarray(self.layout.gathered(self.parts))

    def read(self) -> jax.Array:
        """Return the value for code that reads the variable."""
        context = current()
        if self.needs_all and context is not None and context.is_of_method:
            raise ContextError(
                "Variables of several workers that lie in parts can be read where an epoch ends, "
                "or outside of `fit`, by all workers. Received: a read within an epoch. Save at the end of "
                'epochs (`save_freq="epoch"`), save weights only, or use '
                "`unisono.callbacks.BackupAndRestore`."
            )
        return self.whole()


@dataclasses.dataclass(frozen=True)
class ShardedVariableLayout(VariableLayout):
    """How a variable lies in parts on the replicas."""

    shape: tuple[int, ...]
    group: ProcessGroup

    @property
    def spec(self) -> jax.sharding.PartitionSpec:
        """A part on each replica."""
        return SHARDED

    @property
    def sharding(self) -> jax.sharding.NamedSharding:
        """A part on each device."""
        return self.mesh.sharded

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def part_size(self) -> int:
        """The number of elements of a part."""
        return -(-self.size // self.mesh.num_replicas)

    def place(self, value: VariableValue) -> jax.Array:
        """Return all parts, of `Shards`, of an array of them, or of the variable's value."""
        if isinstance(value, Shards):
            return value.parts
        total = self.part_size * self.mesh.num_replicas
        # In parts already, as the last step left it.
        if isinstance(value, jax.Array) and value.shape == (total,) and value.sharding == self.sharding:
            return value
        dtype = jax.dtypes.canonicalize_dtype(value.dtype)
        # Through the host: the parts go to their devices, and the whole to none.
        fill = value.fill if isinstance(value, ValueHandle) else None
        flat = None if fill is not None else np.asarray(value).astype(dtype, copy=False).reshape(-1)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            if flat is None:
                return np.full(self.part_size, fill, dtype)
            # A copy: an array of a CPU may be the memory that it was made of.
            own = flat[index]
            return np.pad(own, (0, self.part_size - own.size))

        return jax.make_array_from_callback((total,), self.sharding, part)

    def hold(self, array: jax.Array) -> Shards:
        """Return what the variable holds for all parts."""
        return Shards(array, self)

    def cut(self, value: jax.Array) -> Shards:
        """Return what the variable holds after an assignment of a whole value."""
        new = self.hold(self.place(value))
        if not new.parts.is_fully_addressable:
            new._token = np.array([2, zlib.crc32(np.asarray(value).tobytes())], np.uint32)
        return new

    def enter(self, array: jax.Array, in_replica: bool) -> Shards:
        """Return what stands for the variable in a program; code that reads it gets the whole."""
        return Shards(array, self, in_replica)

    def leave(self, value: VariableValue, in_replica: bool) -> jax.Array:
        """Return the parts; of a whole value, in a replica, its own."""
        if isinstance(value, Shards):
            return value.parts
        value = jnp.asarray(value)
        return self.own_part(value) if in_replica else self.rows(value).reshape(-1)

    def rows(self, value: jax.Array) -> jax.Array:
        """Return the parts of a whole value as rows, shape `(replicas, part_size)`."""
        return split_rows(value, self.mesh.num_replicas)

    def own_part(self, value: jax.Array) -> jax.Array:
        """Return this replica's part of a whole value.

        Args:
            value: of the variable's shape, the same on all replicas.
        """
        own: jax.Array = lax.dynamic_index_in_dim(self.rows(value), lax.axis_index(AXIS), keepdims=False)
        return own

    def shaped(self, parts: jax.Array) -> jax.Array:
        """Return the whole value of all parts."""
        return parts.reshape(-1)[: self.size].reshape(self.shape)

    def gathered(self, parts: jax.Array) -> jax.Array:
        """Return the whole value of concrete parts; a collective, where there are several processes."""
        together = not parts.is_fully_addressable
        if together:
            self.group.note_read()
        with self.group.collective() if together else contextlib.nullcontext():
            whole: jax.Array = self.mesh.local(_gather(self)(parts))
            # A worker that waits is then seen by those that have ended.
            return whole.block_until_ready() if together else whole


class _WholeLayout(VariableLayout):
    """How a variable lies in a program that was made before the variable lay in parts."""

    def place(self, value: VariableValue) -> jax.Array:
        """Return the array on every device."""
        return super().place(whole_value(value))


@functools.lru_cache(maxsize=512)
def _gather(layout: ShardedVariableLayout) -> Callable[[jax.Array], jax.Array]:
    # Cached, because a new `jit` of a bound method would compile at each read.
    return jax.jit(layout.shaped, out_shardings=layout.mesh.replicated)


def lies_in_parts(variable: keras.Variable) -> bool:
    """Return whether a variable lies in parts."""
    return isinstance(own_layout(variable), ShardedVariableLayout)


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
        self._whole = _WholeLayout(mesh)

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
            if isinstance(held, Shards):
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
        if len(self._mesh.local_devices) == self._mesh.num_replicas:
            return layout.hold(layout.place(value))
        # Several workers begin with the first one's values: they are made where all know its seed.
        return value.lying(layout.cut) if value.is_repeatable else None

    def _first_layout(self, variable: keras.Variable) -> ShardedVariableLayout | None:
        """Return how a variable begins; the optimizer's decides later how it lies."""
        return self._split(variable.shape) if is_slot(variable) else None

    def _split(self, shape: Sequence[int]) -> ShardedVariableLayout | None:
        """Return how an array of a shape lies in parts; None for one that stays whole."""
        return ShardedVariableLayout(self._mesh, tuple(shape), self._group) if is_split(shape) else None

    def prepare(self, optimizer: keras.Optimizer | None, variables: Sequence[keras.Variable] = ()) -> bool:
        """Mark the variables that lie in parts, once for each optimizer; whether there are any."""
        if optimizer is None or not optimizer.built or self._mesh.num_replicas == 1:
            return False
        if optimizer not in self._in_parts:
            self._in_parts[optimizer] = self._mark(optimizer)
        return self._in_parts[optimizer]

    def _mark(self, optimizer: keras.Optimizer) -> bool:
        reason = why_whole(optimizer)
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
            layout = self._split(variable.shape) if tuple(variable.shape) in shapes else None
            if layout is not None:
                lie_as(variable, layout)
        return any(map(lies_in_parts, [*optimizer.variables, *trained_variables(optimizer)]))

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
        layouts = [self._split(v.shape) for v in trained]
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
        self, op: ReduceOp, grads: list[jax.Array], _: Sequence[keras.Variable]
    ) -> list[VariableValue]:
        """Reduce-scatter gradients; scalars are all-reduced, as every replica updates them."""
        layouts = [self._split(g.shape) for g in grads]
        rows = [layout.rows(g) for layout, g in zip(layouts, grads, strict=True) if layout is not None]
        parts = iter(self._scattered(rows))
        divisor = self._mesh.num_replicas if op is ReduceOp.MEAN else 1
        return [
            (lax.psum(g, AXIS) / divisor).astype(g.dtype)
            if layout is None
            else Shards((next(parts) / divisor).astype(g.dtype), layout, True)
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
        parts = [w for layout, w in zip(layouts, weights, strict=True) if layout is not None]
        packing = self._packing([(p.shape, p.dtype) for p in parts])
        buckets = [lax.all_gather(b, AXIS) for b in pack(parts, packing)]
        rows = iter(unpack(buckets, packing))
        return [
            w if layout is None else layout.shaped(next(rows))
            for layout, w in zip(layouts, weights, strict=True)
        ]

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
