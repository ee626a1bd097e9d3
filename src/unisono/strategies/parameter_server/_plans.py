"""From the programs that the chief has traced to what workers and servers execute.

Tests: tests/virtual/strategies/test_parameter_server.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import keras

from unisono.ps._client import ServerClient
from unisono.ps._placement import VariablePart
from unisono.ps._programs import digest_of
from unisono.ps.worker._step_worker import PushPlan, StepPlan
from unisono.strategies.parameter_server._placed import PlacedVariables
from unisono.training.pushed._jaxprs import exported
from unisono.training.pushed._server_update import Piece, ServerUpdate
from unisono.training.pushed._worker_program import WorkerProgram

#: What an undivided array counts as: one part.
_WHOLE = (VariablePart(0),)


@dataclasses.dataclass(eq=False)
class _Outputs:
    """The numbers of a program's outputs, by what they are; of divided variables one for each part."""

    gradients: dict[tuple[int, int, VariablePart], int]
    extras: dict[tuple[int, str], int]
    adds: dict[tuple[int, VariablePart], int]
    assigns: dict[tuple[int, VariablePart], int]
    results: tuple[int, ...]

    @classmethod
    def of(cls, program: WorkerProgram, placed: PlacedVariables, count: int) -> _Outputs:
        numbers = iter(range(count))

        def of_parts(variable: keras.Variable) -> dict[VariablePart, int]:
            division = placed[variable].division
            if division.is_divided:
                return {part: next(numbers) for part in division.parts}
            return dict.fromkeys(division.parts, next(numbers))

        return cls(
            {(id(o), id(v), p): n for o, v in program.gradients for p, n in of_parts(v).items()},
            {(id(o), name): next(numbers) for o, name in program.extras},
            {(id(v), p): n for v in program.adds for p, n in of_parts(v).items()},
            {(id(v), p): n for v in program.assigns for p, n in of_parts(v).items()},
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

    def plan(self, program: WorkerProgram, arrays: Sequence[int]) -> tuple[StepPlan, bytes]:
        """Return how workers run a program, and what they run; the servers have their programs then.

        Args:
            program: of a step, whose variables are placed.
            arrays: which of a call's arrays the program takes.
        """
        blob, count = in_parts(program, self._placed)
        outputs = _Outputs.of(program, self._placed, count)
        pushes = [self._push(server, program, outputs) for server in range(self._client.num_servers)]
        plan = StepPlan(
            digest_of(blob),
            tuple(key for v in program.reads for key in self._placed[v].keys),
            len(program.streams),
            tuple(arrays),
            tuple(push for push in pushes if push.outputs or push.meta["updates"]),
            outputs.results,
        )
        return plan, blob

    def _push(self, server: int, program: WorkerProgram, outputs: _Outputs) -> PushPlan:
        sent: list[int] = []
        updates: list[dict[str, Any]] = []
        for optimizer in program.optimizers:
            digest, update = self._update(server, optimizer, program.has_gradient(optimizer))
            if not update.writes:
                continue
            sent += [outputs.gradients[id(optimizer), *piece.key] for piece in update.gradients]
            sent += [outputs.extras[id(optimizer), name] for name in update.extras]
            ids = [self._placed[piece.variable].numbers[piece.part] for piece in _touched(update)]
            count = len(update.gradients) + len(update.extras)
            updates.append(
                {"program": digest, "values": ids, "slots": [], "gradients": count, "sparse": False}
            )
        meta: dict[str, Any] = {"updates": updates}
        for key, variables, numbers in (
            ("adds", program.adds, outputs.adds),
            ("assigns", program.assigns, outputs.assigns),
        ):
            own = [(v, part) for v in variables for part in self._placed[v].division.on(server)]
            sent += [numbers[id(v), part] for v, part in own]
            meta[key] = [self._placed[v].numbers[part] for v, part in own]
        return PushPlan(server, tuple(sent), meta)

    def _update(
        self, server: int, optimizer: keras.Optimizer, present: tuple[bool, ...]
    ) -> tuple[str, ServerUpdate]:
        key = (server, id(optimizer), present)
        if key not in self._updates:
            updates, divisions = self._placed.updates_of(optimizer)
            update = updates.program(server, divisions, present)
            digest = self._client.add_program(server, as_lists(update)) if update.writes else ""
            self._updates[key] = digest, update
        return self._updates[key]


def in_parts(program: WorkerProgram, placed: PlacedVariables) -> tuple[bytes, int]:
    """Return a program that takes and gives the parts of divided variables, and the number of its outputs.

    Args:
        program: takes and gives whole variables.
        placed: where they lie.
    """
    inner = jax.export.deserialize(bytearray(program.blob))
    reads = [placed[v].division for v in program.reads]
    changed = [
        [v for _, v in program.gradients],
        [None for _ in program.extras],
        program.adds,
        program.assigns,
    ]
    given = [None if v is None else placed[v].division for group in changed for v in group]
    if not any(division is not None and division.is_divided for division in (*reads, *given)):
        return program.blob, len(inner.out_avals)
    given += [None] * (len(inner.out_avals) - len(given))

    def step(*arrays: jax.Array) -> list[jax.Array]:
        left = iter(arrays)
        whole = [
            jnp.concatenate([next(left) for _ in division.parts]) if division.is_divided else next(left)
            for division in reads
        ]
        found = inner.call(*whole, *left)
        return [
            part.of(value)
            for value, division in zip(found, given, strict=True)
            for part in (division.parts if division is not None and division.is_divided else _WHOLE)
        ]

    specs = [
        jax.ShapeDtypeStruct(part.shape(spec.shape), spec.dtype)
        for spec, division in itertools.zip_longest(program.specs, reads)
        for part in (division.pulled if division is not None else _WHOLE)
    ]
    return exported(step, specs, inner.platforms), sum(
        len(division.parts) if division is not None and division.is_divided else 1 for division in given
    )


def _touched(update: ServerUpdate) -> list[Piece]:
    """Return what an update reads or writes, each once."""
    return list({piece.key: piece for piece in (*update.reads, *update.writes)}.values())


def as_lists(update: ServerUpdate) -> bytes:
    """Return an update in the servers' form: from lists of values, slots and gradients to values and slots.

    Args:
        update: with one argument for each array.
    """
    inner = jax.export.deserialize(bytearray(update.blob))
    touched = [piece.key for piece in _touched(update)]
    at = {key: i for i, key in enumerate(touched)}
    specs = {piece.key: piece.spec for piece in _touched(update)}
    of_gradients = list(update.specs[len(update.reads) :])

    def lists(values: list[Any], slots: list[Any], gradients: list[Any]) -> tuple[list[Any], list[Any]]:
        new = inner.call(*(values[at[piece.key]] for piece in update.reads), *gradients)
        after = dict(zip([piece.key for piece in update.writes], new, strict=True))
        return [after.get(key, value) for key, value in zip(touched, values, strict=True)], []

    made = jax.export.export(jax.jit(lists), platforms=inner.platforms)(
        list(specs.values()), [], of_gradients
    )
    return bytes(made.serialize())
