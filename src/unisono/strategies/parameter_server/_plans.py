"""From the programs that the chief has traced to what workers and servers execute.

Tests: tests/virtual/strategies/test_parameter_server.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import keras

from unisono.ps._client import ServerClient
from unisono.ps.worker._step_worker import PushPlan, StepPlan
from unisono.step._keras_internals import stored_dtype
from unisono.strategies.parameter_server._placed import PlacedVariables
from unisono.training.pushed._server_update import ServerUpdate
from unisono.training.pushed._worker_program import WorkerProgram


@dataclasses.dataclass(eq=False)
class _Outputs:
    """The numbers of a program's outputs, by what they are."""

    gradients: dict[tuple[int, int], int]
    extras: dict[tuple[int, str], int]
    adds: dict[int, int]
    assigns: dict[int, int]
    results: tuple[int, ...]

    @classmethod
    def of(cls, program: WorkerProgram, count: int) -> _Outputs:
        numbers = iter(range(count))
        return cls(
            {(id(o), id(v)): next(numbers) for o, v in program.gradients},
            {(id(o), name): next(numbers) for o, name in program.extras},
            {id(v): next(numbers) for v in program.adds},
            {id(v): next(numbers) for v in program.assigns},
            tuple(numbers),
        )


class PlanMaker:
    """Makes plans for workers, and brings the servers their part.

    Args:
        placed: the variables on servers.
        client: of the servers.
    """

    def __init__(self, placed: PlacedVariables, client: ServerClient) -> None:
        self._placed, self._client = placed, client
        self._updates: dict[tuple[int, int, tuple[bool, ...]], tuple[str, ServerUpdate]] = {}

    def plan(self, program: WorkerProgram, arrays: Sequence[int]) -> StepPlan:
        """Return how workers run a program; the servers have their programs then.

        Args:
            program: of a step, whose variables are placed.
            arrays: which of a call's arrays the program takes.
        """
        outputs = _Outputs.of(program, _num_outputs(program))
        pushes = [self._push(server, program, outputs) for server in range(self._client.num_servers)]
        return StepPlan(
            program.digest,
            tuple(self._placed[v].key for v in program.reads),
            len(program.streams),
            tuple(arrays),
            tuple(push for push in pushes if push.outputs or push.meta["updates"]),
            outputs.results,
        )

    def _push(self, server: int, program: WorkerProgram, outputs: _Outputs) -> PushPlan:
        sent: list[int] = []
        updates: list[dict[str, Any]] = []
        for optimizer in program.optimizers:
            digest, update = self._update(server, optimizer, program.has_gradient(optimizer))
            if not update.writes:
                continue
            sent += [outputs.gradients[id(optimizer), id(v)] for v in update.gradients]
            sent += [outputs.extras[id(optimizer), name] for name in update.extras]
            ids = [self._placed[v].numbers[server] for v in _touched(update)]
            count = len(update.gradients) + len(update.extras)
            updates.append(
                {"program": digest, "values": ids, "slots": [], "gradients": count, "sparse": False}
            )
        meta: dict[str, Any] = {"updates": updates}
        for key, variables, numbers in (
            ("adds", program.adds, outputs.adds),
            ("assigns", program.assigns, outputs.assigns),
        ):
            own = [v for v in variables if server in self._placed[v].homes]
            sent += [numbers[id(v)] for v in own]
            meta[key] = [self._placed[v].numbers[server] for v in own]
        return PushPlan(server, tuple(sent), meta)

    def _update(
        self, server: int, optimizer: keras.Optimizer, present: tuple[bool, ...]
    ) -> tuple[str, ServerUpdate]:
        key = (server, id(optimizer), present)
        if key not in self._updates:
            updates, servers = self._placed.updates_of(optimizer)
            update = updates.program(server, servers, present)
            digest = self._client.add_program(server, as_lists(update)) if update.writes else ""
            self._updates[key] = digest, update
        return self._updates[key]


def _num_outputs(program: WorkerProgram) -> int:
    return len(jax.export.deserialize(bytearray(program.blob)).out_avals)


def _touched(update: ServerUpdate) -> list[keras.Variable]:
    """Return what an update reads or writes, each once."""
    return list({id(v): v for v in (*update.reads, *update.writes)}.values())


def as_lists(update: ServerUpdate) -> bytes:
    """Return an update in the servers' form: from lists of values, slots and gradients to values and slots.

    Args:
        update: with one argument for each array.
    """
    inner = jax.export.deserialize(bytearray(update.blob))
    touched = _touched(update)
    at = {id(v): i for i, v in enumerate(touched)}
    specs = {id(v): jax.ShapeDtypeStruct(tuple(v.shape), jnp.dtype(stored_dtype(v))) for v in touched}
    of_gradients = list(update.specs[len(update.reads) :])

    def lists(values: list[Any], slots: list[Any], gradients: list[Any]) -> tuple[list[Any], list[Any]]:
        new = inner.call(*(values[at[id(v)]] for v in update.reads), *gradients)
        after = dict(zip(map(id, update.writes), new, strict=True))
        return [after.get(id(v), value) for v, value in zip(touched, values, strict=True)], []

    exported = jax.export.export(jax.jit(lists), platforms=inner.platforms)(
        list(specs.values()), [], of_gradients
    )
    return bytes(exported.serialize())
