"""Fragments that replicas of several devices send beside their steps: each device sends its own part.

A device packs what it has of a fragment. What the first devices of all replicas have packed is added up by
itself, and so is what the second ones have: within a process on the devices of its first replica, of several
processes in one message on the device for exchanges. Where a replica has devices of several processes, what
the first processes of all replicas have is added up by itself, too. In a backup sums lie as with replicas of
one device, so that any number of devices continues from them.

Tests: tests/virtual/strategies/test_local_updates_of_grids.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from unisono._context import ReplicaEngine
from unisono._mesh import AXIS
from unisono._values import ReduceOp
from unisono.collectives._packing import PackingPlan, pack, plan, unpack
from unisono.local_updates._exchange_beside_steps import ExchangeBesideSteps, SentFragment, ToSend
from unisono.local_updates._local_layout import Turn
from unisono.local_updates._local_phase import SentMessage, sending_plan
from unisono.local_updates._local_training import LocalPhases, LocalState, LocalTrainFunction
from unisono.model_parallel._replica_grid import MODEL_AXIS, ReplicaGrid
from unisono.sharding._shards import on_devices
from unisono.step._dispatch import Started
from unisono.training.trainer._protocol import State

if TYPE_CHECKING:
    from unisono._types import PyTree

#: How what each device has packed lies on the devices of a replica.
_PACKED = PartitionSpec(MODEL_AXIS)


class SumParts(NamedTuple):
    """How sums of whole arrays are those that each device of a replica has packed.

    Args:
        shapes: of the whole arrays.
        dtypes: of them.
        axes: along which the devices of a replica share each; None where each has the whole.
        size: how many devices a replica has.
    """

    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[np.dtype]
    axes: Sequence[int | None]
    size: int

    def plan(self, size: int) -> PackingPlan:
        """Return how arrays are packed that so many devices share."""
        cut = [
            tuple(n // size if i == axis else n for i, n in enumerate(shape))
            for shape, axis in zip(self.shapes, self.axes, strict=True)
        ]
        return plan(list(zip(cut, self.dtypes, strict=True)), num_packs=1)

    def joined(self, packed: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return whole arrays, packed, of what all devices have packed, one device after the other.

        >>> parts = SumParts([(2, 2), (1,)], [np.dtype("f4")] * 2, [1, None], 2)
        >>> parts.joined([np.array([0, 2, 9], "f4"), np.array([1, 3, 9], "f4")])[0].tolist()
        [0.0, 1.0, 2.0, 3.0, 9.0]
        """
        own = self.plan(self.size)
        count = len(own.buckets)
        of_devices = [_unpacked(packed[i : i + count], own) for i in range(0, len(packed), count)]
        wholes = [
            arrays[0] if axis is None else np.concatenate(arrays, axis)
            for axis, *arrays in zip(self.axes, *of_devices, strict=True)
        ]
        return _packed(wholes, self.plan(1))

    def divided(self, packed: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the packed arrays of each device; the inverse of `joined`."""
        wholes = _unpacked(packed, self.plan(1))
        divided = [
            [x] * self.size if axis is None else np.split(x, self.size, axis)
            for axis, x in zip(self.axes, wholes, strict=True)
        ]
        return [x for arrays in zip(*divided, strict=True) for x in _packed(arrays, self.plan(self.size))]


def _packed(arrays: Sequence[np.ndarray], packing: PackingPlan) -> list[np.ndarray]:
    return [np.concatenate([arrays[i].reshape(-1) for i in bucket]) for bucket in packing.buckets]


def _unpacked(buckets: Sequence[np.ndarray], packing: PackingPlan) -> list[np.ndarray]:
    arrays: dict[int, np.ndarray] = {}
    for bucket, places in zip(buckets, packing.buckets, strict=True):
        sizes = [int(np.prod(packing.shapes[i])) for i in places]
        pieces = np.split(bucket, np.cumsum(sizes)[:-1])
        arrays |= {i: piece.reshape(packing.shapes[i]) for i, piece in zip(places, pieces, strict=True)}
    return [arrays[i] for i in range(len(packing.shapes))]


class ExchangeOfParts(ExchangeBesideSteps):
    """Sends parts of each fragment where its turn ends; see `ExchangeBesideSteps`."""

    @property
    def _grid(self) -> ReplicaGrid:
        return self._replicas.mesh  # type: ignore[return-value]

    def sent(self) -> tuple[list[SentMessage], list[int]]:
        """Return the fragments on their way, with sums on the host as with replicas of one device."""
        sent, trained = super().sent()
        return [m if _is_on_host(m) else self._whole(m) for m in sent], trained

    @functools.cached_property
    def _numbers(self) -> list[int]:
        """The numbers in their replica of this process' devices."""
        grid = self._grid
        return [i for i, d in enumerate(grid.devices_of(grid.local_replicas[0])) if d in grid.local_devices]

    @property
    def _spans(self) -> bool:
        """True if a replica has devices of several processes, each of which sends its own parts."""
        return self._grid.processes_per_replica > 1

    def _whole(self, message: SentMessage) -> SentMessage:
        parts = self._parts_of(message.number, message.rows)
        sums = self._of_replica(message.sums) if self._spans else [np.asarray(x) for x in message.sums]
        return dataclasses.replace(message, sums=parts.joined(sums))

    def _of_replica(self, sums: Sequence[jax.Array]) -> list[np.ndarray]:
        """Return the sums of all devices of a replica, of which this process has some: a collective."""
        mesh, count = self._mesh, self._grid.processes_per_replica
        lies, pieces = NamedSharding(mesh.mesh, _PACKED), list[list[np.ndarray]]()
        with self._replicas.process_group.collective():
            for x in sums:
                of_all = jax.make_array_from_single_device_arrays((count * x.size,), lies, [x])
                pieces.append(np.split(np.asarray(mesh.local(mesh.put(of_all, mesh.replicated))), count))
        return [piece[process] for process in range(count) for piece in pieces]

    def _resumed(self, message: SentMessage) -> tuple[list[Any], list[Any]]:
        """Return sums and rows on the host: how weights lie may be decided by the first batch."""
        return [np.asarray(x) for x in message.sums], [np.asarray(x) for x in message.rows]

    def _parts_of(self, number: int, rows: Sequence[Any]) -> SumParts:
        """Return how the sums of a fragment lie.

        Args:
            rows: of all replicas, of weights and of what is joined with them.
        """
        axes = [
            next((i for i, name in enumerate(cut) if name), None) for cut in _cuts(self._carried.turn(number))
        ]
        # As `Turn.to_send` sends them.
        dtypes = [np.dtype(np.int32) if x.dtype == np.bool_ else np.dtype(x.dtype) for x in rows]
        return SumParts([tuple(x.shape[1:]) for x in rows], dtypes, axes, self._grid.size)

    # --- on devices -----------------------------------------------------------------------------------

    def _target(self, number: int) -> jax.Device:
        """Return where is added up what the devices of a number in their replicas have."""
        grid = self._grid
        if grid.spans_processes:
            return self._mesh.local_devices[0]
        return grid.devices_of(0)[number]

    def _own_sums(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        grid, sums = self._grid, list[jax.Array]()
        for number in self._numbers:
            devices = [grid.devices_of(replica)[number] for replica in grid.local_replicas]
            sums += self._sum_on(devices, parts, self._target(number))
        return sums

    def _sums_of_all(self, own: list[jax.Array], proposed: int) -> tuple[list[jax.Array], jax.Array]:
        if self._spans:
            given = [self._of_all(x) for x in own], self._mesh.put_own(np.int32(proposed))
            (sums, agreed), _ = self._sum((), given)
            return [x.addressable_data(0) for x in sums], self._mesh.local(agreed)
        if self._grid.spans_processes:
            return super()._sums_of_all(own, proposed)
        # Nothing is sent.
        return [x[0] for x in own], jnp.int32(proposed)

    def _of_all(self, row: jax.Array) -> jax.Array:
        if not self._spans:
            return super()._of_all(row)
        mesh = self._mesh
        shape = (mesh.num_replicas, mesh.devices_per_replica * row.shape[1])
        lies = NamedSharding(mesh.mesh, PartitionSpec(AXIS, MODEL_AXIS))
        return jax.make_array_from_single_device_arrays(shape, lies, [row])

    def _apply(self, sent: SentFragment, state: State, newest: list[Started[PyTree, State]] | None) -> State:
        if _is_on_host(sent):
            divided = self._parts_of(sent.number, sent.rows).divided(sent.sums)  # type: ignore[arg-type]
            count = len(divided) // self._grid.size
            sums = [
                jax.device_put(divided[number * count + i], self._target(number))
                for number in self._numbers
                for i in range(count)
            ]
            mesh, cuts = self._grid.mesh, _cuts(self._carried.turn(sent.number))
            rows = [
                self._grid.put(x, NamedSharding(mesh, PartitionSpec(AXIS, *cut)))
                for x, cut in zip(sent.rows, cuts, strict=True)
            ]
            sent = sent._replace(sums=sums, rows=rows)
        return super()._apply(sent, state, newest)

    def _on_replicas(self, sums: list[jax.Array]) -> list[jax.Array]:
        grid, count = self._grid, len(sums) // len(self._numbers)
        lies, placed = NamedSharding(grid.mesh, _PACKED), list[jax.Array]()
        for i in range(count):
            of_devices = sums[i::count]
            parts = [
                jax.device_put(part, grid.devices_of(replica)[number])
                for replica in grid.local_replicas
                for part, number in zip(of_devices, self._numbers, strict=True)
            ]
            shape = (grid.size * of_devices[0].size,)
            placed.append(jax.make_array_from_single_device_arrays(shape, lies, parts))
        return placed

    # --- in a program ---------------------------------------------------------------------------------

    def _packed(self, turn: Turn, own: ToSend) -> list[jax.Array]:
        def packed(own: ToSend) -> list[jax.Array]:
            return pack([*own[0], *own[1]], sending_plan(own))

        flat: list[jax.Array] = on_devices(self._grid, packed, (turn.cuts,), _PACKED)(own)
        return [jax.lax.with_sharding_constraint(x, _PACKED) for x in flat]

    def _all_reduced(self, engine: ReplicaEngine, rows: list[jax.Array]) -> list[jax.Array]:
        if not self._spans:
            return super()._all_reduced(engine, rows)
        sums = functools.partial(engine.all_reduce, ReduceOp.SUM)
        totals: list[jax.Array] = on_devices(self._mesh, sums, (_PACKED,), _PACKED)(rows)
        return [jax.lax.with_sharding_constraint(x, _PACKED) for x in totals]

    def _unpacked(self, turn: Turn, sums: list[jax.Array], own: ToSend) -> ToSend:
        def unpacked(sums: list[jax.Array], own: ToSend) -> ToSend:
            flat = unpack(sums, sending_plan(own))
            return flat[: len(own[0])], flat[len(own[0]) :]

        totals: ToSend = on_devices(self._grid, unpacked, (_PACKED, turn.cuts), turn.cuts)(sums, own)
        return totals

    def _kept(self, turn: Turn, rows: list[jax.Array]) -> list[jax.Array]:
        # In the parts of their weights: XLA could put them together.
        return [
            jax.lax.with_sharding_constraint(x, PartitionSpec(None, *cut))
            for x, cut in zip(rows, _cuts(turn), strict=True)
        ]


def _cuts(turn: Turn) -> list[PartitionSpec]:
    """Return how weights, and what is joined with them, lie on the devices of each replica."""
    return [] if turn.cuts is None else [*turn.cuts[0], *turn.cuts[1]]


def _is_on_host(sent: SentMessage | SentFragment) -> bool:
    return isinstance(sent.sums[0], np.ndarray)


class _GridState(LocalState):
    """The state between steps of replicas of several devices that train apart."""

    def turn(self, number: int) -> Turn:
        """Return the places that the exchange of a fragment changes, and how these are cut."""
        turn = super().turn(number)
        weights, others = (
            [self._layouts[p][i].cut for p, i in places]  # type: ignore[attr-defined]
            for places in (turn.weights, turn.others)
        )
        return turn._replace(cuts=(weights, others))


class _GridTrainFunction(LocalTrainFunction):
    """Keras' `train_function` on replicas of several devices that train apart."""

    state_type, exchange_type = _GridState, ExchangeOfParts


class GridPhases(LocalPhases):
    """The phases of models on replicas of several devices."""

    function_type = _GridTrainFunction
