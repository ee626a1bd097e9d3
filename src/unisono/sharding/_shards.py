"""How one variable lies in equal parts on the replicas, and what it holds then.

A part is a run of a variable's elements in row-major order, filled up with zeros to equal lengths: of `size`
elements each of `n` replicas holds `ceil(size / n)`. Where a replica has several devices that share the
variable along an axis, each device's own elements are divided so: its part of the replica's part.

Tests: tests/virtual/strategies/test_sharded_state.py, tests/virtual/strategies/test_sharded_grid.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from unisono._context import current
from unisono._errors import ContextError
from unisono._mesh import AXIS, ReplicaMesh
from unisono._types import PyTree
from unisono.collectives._packing import split_rows
from unisono.collectives._process_group import ProcessGroup
from unisono.step._engines import SHARDED, UNSHARDED
from unisono.step._layout import VariableLayout, own_layout
from unisono.step._value_handle import (
    AgreedHandle,
    DeferredValue,
    ValueHandle,
    VariableValue,
    different_values,
    whole_value,
)

if TYPE_CHECKING:
    from jax.typing import DTypeLike


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
        return self.layout.divided(value)

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
            return self.layout.whole(self.parts)
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
        joined: np.ndarray = self.layout.joined(np.asarray(self.parts))
        return joined.astype(dtype or self.dtype)

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
    """How a variable lies in parts on the replicas.

    Args:
        axis: along which a replica's devices share it; None where each has all of the replica's part.
    """

    shape: tuple[int, ...]
    group: ProcessGroup
    axis: int | None = None

    @property
    def spec(self) -> PartitionSpec:
        """A part on each replica."""
        return SHARDED

    @property
    def sharding(self) -> NamedSharding:
        """A part on each device, or on the devices of a replica."""
        if self.axis is None:
            return self.mesh.sharded
        return NamedSharding(self.mesh.mesh, PartitionSpec(self.mesh.mesh.axis_names))

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def part_size(self) -> int:
        """The number of elements of a replica's part."""
        if self.axis is None:
            return -(-self.size // self.mesh.num_replicas)
        return self.num_cuts * self.of_device.part_size

    # --- on the devices of a replica ------------------------------------------------------------------

    @property
    def num_cuts(self) -> int:
        """How many devices of a replica share it."""
        return 1 if self.axis is None else self.mesh.devices_per_replica

    @property
    def cut(self) -> PartitionSpec:
        """How the whole value lies on the devices of a replica."""
        return (
            UNSHARDED
            if self.axis is None
            else PartitionSpec(*[None] * self.axis, self.mesh.mesh.axis_names[1])
        )

    @property
    def part_cut(self) -> PartitionSpec:
        """How a replica's part lies on its devices."""
        return UNSHARDED if self.axis is None else PartitionSpec(self.mesh.mesh.axis_names[1])

    @functools.cached_property
    def of_device(self) -> ShardedVariableLayout:
        """How what each device of a replica would have alone lies in parts on the replicas."""
        if self.axis is None:
            return self
        shape = [n // self.num_cuts if i == self.axis else n for i, n in enumerate(self.shape)]
        return ShardedVariableLayout(self.mesh, tuple(shape), self.group)

    # --- between steps --------------------------------------------------------------------------------

    def place(self, value: VariableValue) -> jax.Array:
        """Return all parts, of `Shards`, of an array of them, or of the variable's value."""
        if isinstance(value, Shards) and value.layout.axis == self.axis:
            return value.parts
        total = self.part_size * self.mesh.num_replicas
        # In parts already, as the last step left it.
        if isinstance(value, jax.Array) and value.shape == (total,) and value.sharding == self.sharding:
            return value
        dtype = jax.dtypes.canonicalize_dtype(value.dtype)
        # Through the host: the parts go to their devices, and the whole to none.
        fill = value.fill if isinstance(value, ValueHandle) else None
        own_of = None if fill is not None else self._values_of_devices(value, dtype)
        length = self.of_device.part_size

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            if own_of is None:
                return np.full(length, fill, dtype)
            number = (index[0].start or 0) // length if index else 0
            replica, device = divmod(number, self.num_cuts)
            # A copy: an array of a CPU may be the memory that it was made of.
            own = own_of(device)[replica * length : (replica + 1) * length]
            return np.pad(own, (0, length - own.size))

        return jax.make_array_from_callback((total,), self.sharding, part)

    def _values_of_devices(self, value: VariableValue, dtype: np.dtype) -> Callable[[int], np.ndarray]:
        """Return a function from the number of a replica's device to the elements that it has, flat."""
        if self.axis is None:
            flat = np.asarray(value).astype(dtype, copy=False).reshape(-1)
            return lambda _: flat
        pieces: Any = (
            self._first_pieces(value)
            if isinstance(value, DeferredValue)
            else np.split(np.asarray(value), self.num_cuts, self.axis)
        )
        return functools.cache(lambda i: np.asarray(pieces[i]).astype(dtype, copy=False).reshape(-1))

    def _first_pieces(self, value: DeferredValue) -> dict[int, jax.Array]:
        """Return, by the number of a replica's device, the elements of a first value that are here."""
        grid: Any = self.mesh
        number = grid.local_replicas[0]
        if grid.processes_per_replica > 1:
            # All processes of all replicas make their parts in one program.
            with self.group.collective():
                made = grid.made(value, NamedSharding(grid.mesh, self.cut)).block_until_ready()
        else:
            made = grid.made(value, NamedSharding(grid.mesh_of(number), self.cut))
        on = {shard.device: shard.data for shard in made.addressable_shards}
        return {i: on[device] for i, device in enumerate(grid.devices_of(number)) if device in on}

    def hold(self, array: jax.Array) -> Shards:
        """Return what the variable holds for all parts."""
        return Shards(array, self)

    def divided(self, value: jax.Array) -> Shards:
        """Return what the variable holds after an assignment of a whole value."""
        new = self.hold(self.place(value))
        if not new.parts.is_fully_addressable:
            new._token = np.array([2, zlib.crc32(np.asarray(value).tobytes())], np.uint32)
        return new

    def gathered(self, parts: jax.Array) -> jax.Array:
        """Return the whole value of concrete parts; a collective, where there are several processes."""
        together = not parts.is_fully_addressable
        if together:
            self.group.note_read()
        with self.group.collective() if together else contextlib.nullcontext():
            whole: jax.Array = self.mesh.local(_gather(self)(parts))
            # A worker that waits is then seen by those that have ended.
            return whole.block_until_ready() if together else whole

    # --- in a program ---------------------------------------------------------------------------------

    def enter(self, array: jax.Array, in_replica: bool) -> Shards:
        """Return what stands for the variable in a program; code that reads it gets the whole."""
        return Shards(self.pinned(array, in_replica), self, in_replica)

    def leave(self, value: VariableValue, in_replica: bool) -> jax.Array:
        """Return the parts; of a whole value, in a replica, its own."""
        if isinstance(value, Shards):
            return self.pinned(value.parts, in_replica)
        value = jnp.asarray(value)
        return self.own_part(value) if in_replica else self.pinned(self.rows(value).reshape(-1), in_replica)

    def pinned(self, parts: jax.Array, in_replica: bool) -> jax.Array:
        """Return parts of a program that lie so on the devices of a replica; else XLA chooses."""
        if self.mesh.devices_per_replica == 1:
            return parts
        lies = self.part_cut if in_replica else self.sharding
        pinned: jax.Array = lax.with_sharding_constraint(parts, lies)
        return pinned

    def rows(self, value: jax.Array) -> jax.Array:
        """Return the parts of a whole value as rows, shape `(replicas, part_size)`."""
        replicas, cuts, axis = self.mesh.num_replicas, self.num_cuts, self.axis
        if axis is None:
            return split_rows(value, replicas)
        divided = value.reshape(*self.shape[:axis], cuts, -1, *self.shape[axis + 1 :])
        of_devices = jnp.moveaxis(divided, axis, 0)
        rows = jax.vmap(lambda own: split_rows(own, replicas), out_axes=1)(of_devices)
        return rows.reshape(replicas, -1)

    def own_part(self, value: jax.Array) -> jax.Array:
        """Return this replica's part of a whole value.

        Args:
            value: of the variable's shape, the same on all replicas.
        """

        def own(value: jax.Array) -> Any:
            rows = self.of_device.rows(value)
            return lax.dynamic_index_in_dim(rows, lax.axis_index(AXIS), keepdims=False)

        part: jax.Array = on_devices(self.mesh, own, self.cut, self.part_cut)(value)
        return part

    def whole(self, part: jax.Array) -> jax.Array:
        """Return the whole value in a replica, of its part; a collective."""

        def gathered(part: jax.Array) -> Any:
            return self.of_device.joined(lax.all_gather(part, AXIS, tiled=True))

        value: jax.Array = on_devices(self.mesh, gathered, self.part_cut, self.cut)(part)
        return value

    def shaped(self, parts: jax.Array) -> jax.Array:
        """Return the whole value of all parts, outside of the replicas."""
        whole: jax.Array = self.joined(parts)
        if self.mesh.devices_per_replica > 1:
            whole = lax.with_sharding_constraint(whole, NamedSharding(self.mesh.mesh, self.cut))
        return whole

    def joined(self, parts: Any) -> Any:
        """Return the whole value of all parts.

        Args:
            parts: an array of JAX or NumPy.
        """
        axis = self.axis
        if axis is None:
            return parts.reshape(-1)[: self.size].reshape(self.shape)
        cuts, shape = self.num_cuts, self.of_device.shape
        of_devices = parts.reshape(self.mesh.num_replicas, cuts, -1).swapaxes(0, 1).reshape(cuts, -1)
        own = of_devices[:, : math.prod(shape)].reshape(cuts, *shape)
        places = [*range(1, axis + 1), 0, *range(axis + 1, len(shape) + 1)]
        return own.transpose(places).reshape(self.shape)


def on_devices(
    mesh: ReplicaMesh, function: Callable[..., Any], in_specs: PyTree, out_specs: PyTree
) -> Callable[..., Any]:
    """Return a function of a replica that runs once for each of its devices, on what each one has.

    XLA would gather what the devices share for a collective of the replicas.

    Args:
        in_specs: how arguments lie on a replica's devices.
        out_specs: the same of results.
    """
    if mesh.devices_per_replica == 1:
        return function
    inner = {mesh.mesh.axis_names[1]}
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=inner, check_vma=False)


class WholeLayout(VariableLayout):
    """How a variable lies in a program that was made before the variable lay in parts."""

    def place(self, value: VariableValue) -> jax.Array:
        """Return the array on every device."""
        return super().place(whole_value(value))


@functools.lru_cache(maxsize=512)
def _gather(layout: ShardedVariableLayout) -> Callable[[jax.Array], jax.Array]:
    # Cached, because a new `jit` of a bound method would compile at each read. Of several processes, no one
    # has all parts of a replica: each gets the whole.
    lies = UNSHARDED if layout.mesh.processes_per_replica > 1 else layout.cut
    return jax.jit(layout.shaped, out_shardings=NamedSharding(layout.mesh.mesh, lies))


def lies_in_parts(variable: keras.Variable) -> bool:
    """Return whether a variable lies in parts."""
    return isinstance(own_layout(variable), ShardedVariableLayout)
