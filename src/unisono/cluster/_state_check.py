"""Compare now and then whether all workers hold the same state while they train.

A number set on one worker, or weights changed there, would make its copies drift apart without an error.
A check reads the state that a step has left, in programs of its own: a sum for each variable, and one
small message between all. It starts after steps that are the same on all workers, and is read
where the next one starts, when it is long done, so that no step waits and all workers raise together.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from unisono._errors import ClusterError
from unisono._mesh import AXIS, ReplicaMesh
from unisono.cluster.liveness._status import InFlight
from unisono.cluster.rendezvous._mismatch import named

_LOG = logging.getLogger("unisono")

#: Steps between two checks. One costs less than a step, which sends every gradient: at most 0.4 % of them.
_EVERY = 256

#: Differences of this size, of the largest element, come from devices of different kinds, which round
#: in different ways: 256 steps change less.
_ROUNDING = 1e-3


class StateCheck:
    """Compares the state of all workers after the steps 1, 2, 4, …, 256, 512, 768, …."""

    def __init__(self, mesh: ReplicaMesh, in_flight: InFlight) -> None:
        self._mesh, self._in_flight = mesh, in_flight
        self._next = 1
        self._running: tuple[int, jax.Array] | None = None
        self._has_warned = False
        # The first replica of each process: its replicas run one program.
        self._devices = _first_replicas(mesh)
        rows = jax.sharding.Mesh(np.array(self._devices), (AXIS,))
        self._sharding = jax.sharding.NamedSharding(rows, jax.sharding.PartitionSpec(AXIS))
        self._gather = self._shared(lambda x: jax.lax.all_gather(x[0], AXIS), rows, self._sharding.spec)
        self._spans = self._shared(_spans, mesh.mesh, jax.sharding.PartitionSpec())

    def _shared(
        self,
        function: Callable[..., jax.Array],
        mesh: jax.sharding.Mesh,
        spec: jax.sharding.PartitionSpec,
    ) -> Callable[..., jax.Array]:
        """Compile a function that runs on all devices, each with its part, and returns the same on all."""
        whole = jax.sharding.PartitionSpec()
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=whole, check_vma=False))

    def note_steps(self, steps: int, state: Callable[[], tuple[Sequence[str], Sequence[jax.Array]]]) -> None:
        """Note that steps were started; compare where it is time.

        Raises:
            ClusterError: on all workers, when an earlier check has found a difference.
        """
        if steps < self._next:
            return
        self._next = steps + min(steps, _EVERY)
        names, arrays = state()
        if not arrays:
            return
        self._read(names, arrays)
        self._running = steps, self._sums(arrays)

    def compare(self, names: Sequence[str], arrays: Sequence[jax.Array]) -> None:
        """Compare a state at once.

        Raises:
            ClusterError: on all workers, when they differ by more than rounding.
        """
        self._read(names, arrays)
        self._running = 0, self._sums(arrays)
        self._read(names, arrays)

    def _sums(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Return 32 bits for each array, of all processes: (processes, arrays); not waited for."""
        rows = []
        # A small program for each kind of array: one for all would take seconds to compile.
        for device in self._devices:
            if device.process_index == jax.process_index():
                row = jax.device_put(np.zeros(len(arrays), np.uint32), device)
                for i, array in enumerate(arrays):
                    row = _with_sum(row, np.int32(i), _on(device, array))
                rows.append(row[None])
        shape = (len(self._devices), len(arrays))
        every = jax.make_array_from_single_device_arrays(shape, self._sharding, rows)
        # A worker whose machine disappears must be noticed here, too.
        with self._in_flight.collective():
            sums = self._gather(every)
        # JAX's stubs leave `is_ready` out.
        self._in_flight.note_concurrent_program(sums)  # type: ignore[arg-type]
        return sums

    def _read(self, names: Sequence[str], arrays: Sequence[jax.Array]) -> None:
        """Read the check before, and look at the state now where it has found a difference."""
        running, self._running = self._running, None
        if running is None:
            return
        sums = np.asarray(self._mesh.local(running[1]))
        # Of each process, a row for each device of a replica.
        sums = sums.reshape(-1, self._mesh.devices_per_replica, sums.shape[-1])
        found = [int(i) for i in np.flatnonzero((sums != sums[0]).any(axis=(0, 1)))]
        if not found:
            return
        names, arrays = [names[i] for i in found], [arrays[i] for i in found]
        placed = [self._mesh.put(x, self._mesh.replicated) for x in arrays]
        with self._in_flight.collective():
            spans, scales = np.asarray(self._mesh.local(self._spans(placed)), np.float64)
        is_exact = np.array([not jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays])
        # Not `spans > limits`, which is false for NaN.
        apart = ~(spans <= np.where(is_exact, 0, _ROUNDING * scales))
        if apart.any():
            raise ClusterError(self._message(running[0], names, arrays, spans, apart))
        if not self._has_warned:
            _LOG.warning("The workers' weights differ in rounding: their devices compute in different ways.")
        self._has_warned = True

    def _message(
        self,
        steps: int,
        names: Sequence[str],
        arrays: Sequence[jax.Array],
        spans: np.ndarray,
        apart: np.ndarray,
    ) -> str:
        # A number such as the learning rate is rather the cause, and weights the effect.
        found = [int(i) for i in np.flatnonzero(apart.any(axis=0))]
        first = min(found, key=lambda i: (arrays[i].size > 1, i))
        processes = {d.process_index for r, d in enumerate(self._mesh.devices) if apart[r, first]}
        others = f", and so do {len(found) - 1} others" if len(found) > 1 else ""
        when = f"after about {steps} steps" if steps else "at the end of an epoch"
        return (
            f"All workers must hold the same weights. Received: {when}, variable {names[first]!r} of "
            f"{named(processes)} differs from process 0's by up to {np.nanmax(spans[:, first]):.3g}{others}. "
            "Set weights, learning rates and `trainable` on every worker alike, or in a callback where an "
            "epoch begins or ends: then all take over what the first worker has set."
        )


def _first_replicas(mesh: ReplicaMesh) -> list[jax.Device]:
    """Return the devices of the first replica of each process; all devices where they are of one process."""
    if not mesh.spans_processes:
        return list(mesh.devices)
    of_process: dict[int, list[jax.Device]] = {}
    for device in mesh.devices:
        of_process.setdefault(device.process_index, []).append(device)
    return [d for own in of_process.values() for d in own[: mesh.devices_per_replica]]


def _on(device: jax.Device, array: jax.Array) -> jax.Array:
    """Return the copy of an array that a device holds, or a copy of one that lies elsewhere."""
    for shard in array.addressable_shards:
        if shard.device == device:
            here: jax.Array = shard.data
            return here
    copy: jax.Array = jax.device_put(array.addressable_data(0), device)
    return copy


@functools.partial(jax.jit, donate_argnums=0)
def _with_sum(sums: jax.Array, number: jax.Array, array: jax.Array) -> jax.Array:
    return sums.at[number].set(_sum(_real(array)))


def _sum(array: jax.Array) -> jax.Array:
    """Return a sum of hashes of an array's elements and their places (the end of MurmurHash3)."""
    bits = array.dtype.itemsize * 8
    words = jax.lax.bitcast_convert_type(array, jnp.uint32 if bits >= 32 else f"uint{bits}")
    words = words.reshape(-1).astype(jnp.uint32)
    mixed = words ^ (jax.lax.iota(jnp.uint32, words.size) * jnp.uint32(0x9E3779B1))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _spans(arrays: list[jax.Array]) -> jax.Array:
    """Return how far arrays are from the first replica's, and the largest there: (2, replicas, arrays)."""
    found = [_span(_real(x)) for x in arrays]
    spans, scales = (jnp.stack([pair[i] for pair in found]) for i in (0, 1))
    return jnp.moveaxis(jax.lax.all_gather(jnp.stack([spans, scales]), AXIS), 0, 1)


def _span(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    # What is smaller than 32 bits has no sum over replicas everywhere.
    if array.dtype.itemsize < 4:
        array = array.astype(jnp.float32)
    is_first = jax.lax.axis_index(AXIS) == 0
    first = jax.lax.psum(jnp.where(is_first, array, jnp.zeros_like(array)), AXIS)
    is_equal = (array == first) | (jnp.isnan(array) & jnp.isnan(first))
    apart = jnp.abs(array.astype(jnp.float32) - first.astype(jnp.float32))
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        apart = jnp.maximum(apart, 1)  # also of large integers, which are equal as floats
    size = jnp.abs(first.astype(jnp.float32))
    return (
        jnp.max(jnp.where(is_equal, 0, apart), initial=0),
        jnp.max(jnp.where(jnp.isfinite(size), size, 0), initial=0),
    )


def _real(array: jax.Array) -> jax.Array:
    """Return real numbers that stand for an array's elements."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return jnp.stack([array.real, array.imag])
    return array.astype(jnp.uint8) if array.dtype == jnp.bool_ else array
