"""Fragments of weights that are sent while replicas that train apart take their next steps.

An exchange is three programs: one on the replicas reads what each of them adds to the sums, one on devices of
its own (`LocalLayout.exchange_mesh`) sends them, and one on the replicas applies the sums. XLA:CPU begins
nothing on a device while a collective of that device runs, hence the other devices; and the programs of the
replicas send nothing. The host starts each after a fixed number of steps: numbers do not depend on how long a
message takes.

Tests: tests/virtual/strategies/test_local_overlap.py.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from unisono._context import OneReplica, ReplicaEngine
from unisono._mesh import AXIS
from unisono._types import PyTree
from unisono._values import ReduceOp
from unisono.collectives._packing import pack, unpack
from unisono.local_updates._local_layout import LocalLayout, Turn, with_changes
from unisono.local_updates._local_phase import SentMessage, rows_on_replicas, sending_plan
from unisono.step._dispatch import CompiledStep, Started
from unisono.step._engines import SHARDED, UNSHARDED, SpmdEngine
from unisono.training.trainer._protocol import State

if TYPE_CHECKING:
    from unisono.local_updates._local_training import LocalState
    from unisono.step._replicas import Replicas


#: The addends of a replica, of weights and of the others.
ToSend: TypeAlias = tuple[list[jax.Array], list[jax.Array]]


class SentFragment(NamedTuple):
    """A fragment that was sent, and is not applied yet.

    Args:
        number: of the fragment.
        trained: after how many steps since its exchange before.
        at: how many steps were taken in all when it was sent.
        sums: of all replicas, on the device for exchanges; known when the message has come.
        agreed: the smallest group size that a process proposes.
        rows: the replicas' own, when it was sent.
    """

    number: int
    trained: int
    at: int
    sums: list[jax.Array]
    agreed: jax.Array
    rows: list[jax.Array]


class ExchangeBesideSteps:
    """Sends each fragment where its turn ends, and applies it `overlap` steps later.

    Args:
        replicas: that train.
        layout: where their state lies.
        carried: the state between steps.
    """

    def __init__(self, replicas: Replicas, layout: LocalLayout, carried: LocalState) -> None:
        self._replicas, self._carried = replicas, carried
        self._sync, self._mesh = layout.sync, layout.exchange_mesh
        #: The smallest group size that a process proposed with the fragment applied last; None for one.
        self.agreed: jax.Array | None = None
        if self._mesh.num_replicas > 1:
            self.agreed = jax.device_put(np.int32(1), self._mesh.local_devices[0])
        self._steps = 0
        #: How many steps each fragment was trained since it was sent.
        self._trained = [0] * self._sync.fragments
        self._running: collections.deque[SentFragment] = collections.deque()
        self._sum = self._sum_program()
        # What a process' replicas add up before it is sent.
        self._own_sum = jax.jit(lambda rows: jax.tree.map(lambda *xs: sum(xs[1:], xs[0]), *rows))
        self._programs: dict[tuple[object, ...], CompiledStep[PyTree, PyTree, PyTree]] = {}

    def room(self, done: int) -> int:
        """Return how many steps may be taken before a fragment must be sent or applied.

        Args:
            done: how many steps of the phase are done.
        """
        until_sent = min(end - done for end in self._sync._ends if end > done)
        until_applied = [self._running[0].at + self._sync.overlap - self._steps] if self._running else []
        return min([until_sent, *until_applied])

    def advance(
        self, state: State, steps: int, done: int, wish: int, newest: list[Started[PyTree, State]]
    ) -> State:
        """Apply and send what is due after some steps; return the state.

        Args:
            state: after them.
            steps: how many, at most `room`.
            done: how many steps of the phase are done.
            wish: the group size that this process proposes.
            newest: becomes the newest state, as for a `CompiledStep`.
        """
        self._steps += steps
        self._trained = [each + steps for each in self._trained]
        while self._running and self._running[0].at + self._sync.overlap == self._steps:
            state = self._apply(self._running.popleft(), state, newest)
        for number, end in enumerate(self._sync._ends):
            if end % self._sync.every == done:
                self._send(number, state, wish)
        return state

    def finish(self, state: State) -> tuple[State, jax.Array]:
        """Apply all that was sent; return the state, and which fragments were trained since then."""
        while self._running:
            state = self._apply(self._running.popleft(), state, None)
        mesh, due = self._replicas.mesh, np.array(self._trained) > 0
        self._trained = [0] * len(self._trained)
        return state, mesh.put(due, mesh.replicated)

    def sent(self) -> tuple[list[SentMessage], list[int]]:
        """Return what is not applied, and how many steps each fragment was trained since it was sent."""
        sent = [
            SentMessage(each.number, each.trained, self._steps - each.at, each.sums, each.rows)
            for each in self._running
        ]
        return sent, list(self._trained)

    def resume(self, sent: Sequence[SentMessage], trained: Sequence[int]) -> None:
        """Continue from what `sent` has returned in another process."""
        device = self._mesh.local_devices[0]
        self._steps, self._trained = 0, list(trained)
        self._running.clear()
        for each in sent:
            sums, rows = self._resumed(each)
            agreed = jax.device_put(np.int32(1), device)
            self._running.append(SentFragment(each.number, each.trained, -each.ago, sums, agreed, rows))

    def _resumed(self, message: SentMessage) -> tuple[list[Any], list[Any]]:
        """Return sums and rows of a fragment that another process has sent."""
        device, mesh = self._mesh.local_devices[0], self._replicas.mesh
        sums = [jax.device_put(np.asarray(x), device) for x in message.sums]
        return sums, [rows_on_replicas(mesh, x) for x in message.rows]

    def drop(self) -> None:
        """Forget what was sent, where weights have changed since. The next exchange has all of it."""
        for sent in self._running:
            self._trained[sent.number] += sent.trained
        self._running.clear()

    def _send(self, number: int, state: State, wish: int) -> None:
        program = self._program("send", number)
        (parts, rows), _ = program((), state)
        # Copying may wait for the replicas, which may wait for the other processes.
        with self._replicas.process_group.dispatch():
            own = self._own_sums(parts)
        sums, agreed = self._sums_of_all(own, wish)
        trained, self._trained[number] = self._trained[number], 0
        self._running.append(SentFragment(number, trained, self._steps, sums, agreed, rows))

    def _own_sums(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the sums of this process' replicas, on the device for exchanges."""
        return self._sum_on(self._replicas.mesh.local_devices, parts, self._mesh.local_devices[0])

    def _sum_on(
        self, devices: Sequence[jax.Device], parts: Sequence[jax.Array], to: jax.Device
    ) -> list[jax.Array]:
        """Return the sums of what some devices have of arrays."""
        own = [[next(s.data for s in x.addressable_shards if s.device == d) for x in parts] for d in devices]
        sums: list[jax.Array] = self._own_sum([jax.device_put(rows, to) for rows in own])
        return sums

    def _sums_of_all(self, own: list[jax.Array], proposed: int) -> tuple[list[jax.Array], jax.Array]:
        """Return the sums of all processes, and the smallest group size that one proposes: one message."""
        mesh = self._mesh
        given = [self._of_all(x) for x in own], mesh.put_own(np.int32(proposed))
        (sums, agreed), _ = self._sum((), given)
        return mesh.local_each(sums), mesh.local(agreed)

    def _of_all(self, row: jax.Array) -> jax.Array:
        """Return the array of which a process has a row."""
        shape = (self._mesh.num_replicas, *row.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._mesh.sharded, [row])

    def _apply(self, sent: SentFragment, state: State, newest: list[Started[PyTree, State]] | None) -> State:
        program = self._program("apply", sent.number)
        with self._replicas.process_group.dispatch():
            sums = self._on_replicas(sent.sums)
        _, state = program(state, (sums, sent.rows), newest)
        if self.agreed is not None:
            self.agreed = sent.agreed
        return state

    def _on_replicas(self, sums: list[jax.Array]) -> list[jax.Array]:
        """Return sums on the devices of the replicas."""
        mesh = self._replicas.mesh
        return list(mesh.put(sums, mesh.replicated))

    # --- programs -------------------------------------------------------------------------

    def _program(self, kind: str, number: int) -> CompiledStep[PyTree, PyTree, PyTree]:
        key = kind, number, self._carried.sizes
        if key not in self._programs:
            make = self._send_program if kind == "send" else self._apply_program
            self._programs[key] = make(number)
        return self._programs[key]

    def _send_program(self, number: int) -> CompiledStep[PyTree, State, PyTree]:
        """Return what reads a row of sums' parts for each replica, and the replicas' own rows."""
        carried = self._carried

        def program(_: PyTree, state: State) -> tuple[PyTree, PyTree]:
            turn = carried.turn(number)
            weights, others, _ = taken = turn.of(state)
            flat = self._packed(turn, turn.to_send(taken, carried.engine))
            return ([x[None] for x in flat], self._kept(turn, [rows for _, rows in (*weights, *others)])), ()

        return CompiledStep(
            program,
            self._replicas.mesh,
            in_specs=((), carried.specs),
            out_specs=(SHARDED, ()),
            process_group=self._replicas.process_group,
        )

    def _packed(self, turn: Turn, own: ToSend) -> list[jax.Array]:
        """Return the arrays that travel, of what a replica adds to the sums."""
        return pack([*own[0], *own[1]], sending_plan(own))

    def _unpacked(self, turn: Turn, sums: list[jax.Array], own: ToSend) -> ToSend:
        """Return the sums, of the arrays that travel; the inverse of `_packed`."""
        flat = unpack(sums, sending_plan(own))
        return flat[: len(own[0])], flat[len(own[0]) :]

    def _kept(self, turn: Turn, rows: list[jax.Array]) -> list[jax.Array]:
        """Return the replica's rows as they lie until the sums are applied."""
        return rows

    def _sum_program(self) -> CompiledStep[PyTree, PyTree, PyTree]:
        """Return what adds up one row of each process, and finds the smallest wish."""
        processes = self._mesh.num_replicas
        engine: ReplicaEngine = OneReplica()
        if processes > 1:
            engine = SpmdEngine(processes, self._replicas.cross_device_ops)

        def program(_: PyTree, given: tuple[list[jax.Array], jax.Array]) -> tuple[PyTree, PyTree]:
            rows, wish = given
            sums = self._all_reduced(engine, [x[0] for x in rows])
            return (sums, jax.lax.pmin(wish.min(), AXIS) if processes > 1 else wish[0]), ()

        return CompiledStep(
            program,
            self._mesh,
            in_specs=((), SHARDED),
            out_specs=(UNSHARDED, ()),
            process_group=self._replicas.process_group,
        )

    def _all_reduced(self, engine: ReplicaEngine, rows: list[jax.Array]) -> list[jax.Array]:
        """Return the sums over all processes, in a program."""
        return engine.all_reduce(ReduceOp.SUM, rows)

    def _apply_program(self, number: int) -> CompiledStep[State, PyTree, PyTree]:
        """Return what applies sums, and adds what each replica has changed since they were sent."""
        carried = self._carried

        def program(state: State, given: PyTree) -> tuple[PyTree, State]:
            sums, sent = given
            turn, parts = carried.turn(number), [list(part) for part in state]
            weights, others, _ = taken = turn.of(parts)
            totals = self._unpacked(turn, sums, turn.to_send(taken, carried.engine))
            found = turn.joined(taken, totals, carried.engine)
            found = jax.tree.map(lambda old, new: jnp.asarray(new, old.dtype), taken, found)
            rows = [rows for _, rows in (*weights, *others)]
            pairs = [
                with_changes(begun, now, old)
                for begun, now, old in zip((*found[0], *found[1]), rows, sent, strict=True)
            ]
            turn.put(parts, (pairs[: len(weights)], pairs[len(weights) :], found[2]))
            return (), tuple(parts)

        return carried.compiled(program, (UNSHARDED, SHARDED))
