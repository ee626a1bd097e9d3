"""From the programs that the chief has traced to what workers and servers execute.

Tests: tests/virtual/strategies/test_parameter_server.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.export
import jax.numpy as jnp
import keras

from unisono._errors import UnsupportedError
from unisono.parameter_server.chief._placement import Division, VariablePart
from unisono.parameter_server.chief._remote_variables import RemoteVariables
from unisono.parameter_server.programs._preparation import extras_of, rounded_to
from unisono.parameter_server.programs._push_layout import UpdateCall
from unisono.parameter_server.programs._server_update import ServerUpdate
from unisono.parameter_server.programs._worker_program import WorkerProgram
from unisono.parameter_server.server._client import ServerClient
from unisono.parameter_server.server._programs import digest_of
from unisono.parameter_server.tables._lookups import TableLookups
from unisono.parameter_server.worker._step_plan import PushMeta, PushPlan, StepPlan, UpdateMeta
from unisono.parameter_server.worker._table_rows import GroupPlan, LookupPlan, RowPush, TablePart, TablePlan
from unisono.step._keras_internals import trained_variables
from unisono.training._jaxprs import exported

#: What an undivided array counts as: one part.
_WHOLE = (VariablePart(0),)


@dataclasses.dataclass(eq=False)
class _Outputs:
    """The numbers of a program's outputs, by what they are; of divided variables one for each part."""

    gradients: dict[tuple[UpdateCall, int, VariablePart], int]
    extras: dict[tuple[UpdateCall, str], int]
    adds: dict[tuple[int, VariablePart], int]
    assigns: dict[tuple[int, VariablePart], int]
    results: tuple[int, ...]

    @classmethod
    def of(cls, program: WorkerProgram, placed: RemoteVariables, count: int) -> _Outputs:
        numbers = iter(range(count))

        def of_parts(variable: keras.Variable) -> dict[VariablePart, int]:
            division = placed[variable].division
            if division.is_divided and not placed[variable].is_table:
                return {part: next(numbers) for part in division.parts}
            return dict.fromkeys(division.parts, next(numbers))

        return cls(
            {(u, id(v), p): n for u, v in program.gradients for p, n in of_parts(v).items()},
            {(u, name): next(numbers) for u, name in program.extras},
            {(id(v), p): n for v in program.adds for p, n in of_parts(v).items()},
            {(id(v), p): n for v in program.assigns for p, n in of_parts(v).items()},
            tuple(numbers),
        )


class PlanMaker:
    """Makes plans for workers, and brings the servers their part."""

    def __init__(self, placed: RemoteVariables, client: ServerClient) -> None:
        self._placed, self._client = placed, client
        self._updates: dict[tuple[int, int, tuple[bool, ...]], tuple[str, ServerUpdate]] = {}

    def forget(self, optimizers: Sequence[keras.Optimizer]) -> None:
        """Forget the updates of optimizers, whose variables are no longer on servers."""
        gone = {id(optimizer) for optimizer in optimizers}
        self._updates = {key: update for key, update in self._updates.items() if key[1] not in gone}

    def plan(self, program: WorkerProgram, arrays: Sequence[int]) -> tuple[StepPlan, list[bytes]]:
        """Return how workers run a program, and what they run; the servers have their programs then."""
        trained = [v for _, v in program.gradients]
        changed = [*trained, *(None for _ in program.extras), *program.adds, *program.assigns]
        types = self._pulled_types(program, program.reads)
        blob = _in_parts(
            program.blob,
            [self._placed[v].division for v in program.reads],
            [None if v is None or self._placed[v].is_table else self._placed[v].division for v in changed],
            types,
        )
        outputs = _Outputs.of(program, self._placed, len(jax.export.deserialize(bytearray(blob)).out_avals))
        pushes = [self._push(server, program, outputs) for server in range(self._client.num_servers)]
        plan = StepPlan(
            digest_of(blob),
            tuple(
                key
                for v, dtype in zip(program.reads, types, strict=True)
                for key in self._placed[v].keys(dtype)
            ),
            len(program.streams),
            tuple(arrays),
            tuple(push for push in pushes if push.outputs or push.meta["updates"]),
            outputs.results,
        )
        if program.lookups is None:
            return plan, [blob]
        lookups, of_lookups = self._lookups(program, program.lookups)
        return dataclasses.replace(plan, lookups=lookups), [blob, *of_lookups]

    def _pulled_types(
        self, program: WorkerProgram, variables: Sequence[keras.Variable | None]
    ) -> list[str | None]:
        """Return the types to which the weights that a step trains are rounded; None for all else.

        Exact are metrics and moving averages, to which a step adds, and all that `evaluate` reads.
        """
        trained = {id(v) for _, v in program.gradients}
        return [
            rounded_to(v, self._placed.pull_dtype) if v is not None and id(v) in trained else None
            for v in variables
        ]

    def _lookups(self, program: WorkerProgram, lookups: TableLookups) -> tuple[LookupPlan, list[bytes]]:
        """Return how workers find the rows of a step, and the program for that, where there is one."""
        groups = tuple(
            GroupPlan(
                group.size, tuple(map(self._table, group.tables, self._pulled_types(program, group.tables)))
            )
            for group in lookups.groups
        )
        if not lookups.sites:
            return LookupPlan("", (), groups, ()), []
        counts = [len(self._placed[v].keys()) for v in program.reads]
        first = [sum(counts[:i]) + max(0, i - len(counts)) for i in range(len(program.specs))]
        # Numbers of rows that depend on variables are rare: of divided ones all parts are taken.
        takes = tuple(first[i] + n for i in lookups.takes for n in range(counts[i] if i < len(counts) else 1))
        reads = [program.reads[i] if i < len(counts) else None for i in lookups.takes]
        divisions = [None if v is None else self._placed[v].division for v in reads]
        blob = _in_parts(lookups.blob, divisions, types=self._pulled_types(program, reads))
        return LookupPlan(digest_of(blob), takes, groups, lookups.sites), [blob]

    def _table(self, variable: keras.Variable, rounded: str | None) -> TablePlan:
        placed = self._placed[variable]
        parts = tuple(
            TablePart(part.server, placed.numbers[part], *(part.rows or (0, variable.shape[0])))
            for part in placed.division.pulled
        )
        return TablePlan(parts, tuple(variable.shape[1:]), placed.dtype.name, rounded)

    def _push(self, server: int, program: WorkerProgram, outputs: _Outputs) -> PushPlan:
        sent: list[int] = []
        rows = [push for call in program.updates for push in self._rows(server, call, program, outputs)]
        # Before all others, which change what all variables share: the count of iterations.
        updates: list[UpdateMeta] = [meta for _, meta in rows]
        for call in program.updates:
            digest, update = self._update(server, call.optimizer, program.has_gradient(call))
            if not update.writes:
                continue
            sent += [outputs.gradients[call, *piece.key] for piece in update.gradients]
            sent += [outputs.extras[call, name] for name in update.extras]
            ids = [self._placed[piece.variable].numbers[piece.part] for piece in update.values]
            count = len(update.gradients) + len(update.extras)
            updates.append(
                {"program": digest, "values": ids, "slots": [], "gradients": count, "sparse": False}
            )
        own = [
            [(v, part) for v in variables for part in self._placed[v].division.on(server)]
            for variables in (program.adds, program.assigns)
        ]
        sent += [outputs.adds[id(v), part] for v, part in own[0]]
        sent += [outputs.assigns[id(v), part] for v, part in own[1]]
        adds, assigns = ([self._placed[v].numbers[part] for v, part in pairs] for pairs in own)
        meta: PushMeta = {"updates": updates, "adds": adds, "assigns": assigns}
        return PushPlan(server, tuple(sent), meta, tuple(push for push, _ in rows))

    def _rows(
        self, server: int, call: UpdateCall, program: WorkerProgram, outputs: _Outputs
    ) -> Iterator[tuple[RowPush, UpdateMeta]]:
        """Yield what is pushed of the tables that an optimizer trains, and what the server reads of it."""
        optimizer = call.optimizer
        groups = [] if program.lookups is None else list(program.lookups.groups)
        variables = [*trained_variables(optimizer), *optimizer.variables]
        trained = trained_variables(optimizer)
        extras, first = extras_of(optimizer), len(variables) + len(trained)
        for of, variable in program.gradients:
            placed = self._placed[variable]
            if of != call or not placed.is_table:
                continue
            update = self._placed.row_update(optimizer, variable)
            if update is None or call.call:
                raise _not_by_rows(optimizer, variable, call.call > 0)
            group = next((i for i, g in enumerate(groups) if any(v is variable for v in g.tables)), -1)
            flags = [outputs.extras[call, name] for name in (extras[i - first] for i in update.flags)]
            digest = self._client.add_program(server, update.blob)
            for part in placed.division.on(server):
                begin, end = part.rows or (0, variable.shape[0])
                sent = (outputs.gradients[call, id(variable), part], *flags)
                ids = [self._number(variables[i], part) for i in update.values]
                yield (
                    RowPush(group, begin, end, sent),
                    {"program": digest, "values": ids, "slots": [], "gradients": len(sent), "sparse": True},
                )

    def _number(self, variable: keras.Variable, part: VariablePart) -> int:
        """Return the number of a variable's part, or of the copy of a variable on the part's server."""
        placed = self._placed[variable]
        return placed.numbers[part if part in placed.numbers else VariablePart(part.server)]

    def _update(
        self, server: int, optimizer: keras.Optimizer, present: tuple[bool, ...]
    ) -> tuple[str, ServerUpdate]:
        key = (server, id(optimizer), present)
        if key not in self._updates:
            updates, divisions = self._placed.updates_of(optimizer)
            tables = frozenset(i for i, v in enumerate(updates.trained) if self._placed[v].is_table)
            update = updates.program(server, divisions, present, tables)
            digest = self._client.add_program(server, update.blob) if update.writes else ""
            self._updates[key] = digest, update
        return self._updates[key]


def _parts_of(division: Division | None) -> Sequence[VariablePart]:
    return division.parts if division is not None and division.is_divided else _WHOLE


def _in_parts(
    blob: bytes,
    takes: Sequence[Division | None],
    gives: Sequence[Division | None] = (),
    types: Sequence[str | None] = (),
) -> bytes:
    """Return a program that takes variables as they are pulled, and gives the parts of divided ones.

    Args:
        blob: takes and gives whole ones, of their own types.
        takes: where its first arguments lie; None for what is no variable.
        gives: likewise of its first results.
        types: to which its first arguments are rounded; None where they are not.
    """
    if not any(types) and all(_parts_of(division) is _WHOLE for division in (*takes, *gives)):
        return blob
    inner = jax.export.deserialize(bytearray(blob))

    def run(*arrays: jax.Array) -> list[jax.Array]:
        left = iter(arrays)
        whole = [
            next(left) if _parts_of(d) is _WHOLE else jnp.concatenate([next(left) for _ in _parts_of(d)])
            for d in takes
        ]
        given = [x.astype(aval.dtype) for x, aval in zip([*whole, *left], inner.in_avals, strict=True)]
        results = itertools.zip_longest(inner.call(*given), gives)
        return [part.of(value) for value, division in results for part in _parts_of(division)]

    specs = [
        jax.ShapeDtypeStruct(part.shape(aval.shape), dtype or aval.dtype)
        for aval, division, dtype in itertools.zip_longest(inner.in_avals, takes, types)
        for part in _parts_of(division)
    ]
    return exported(run, specs, inner.platforms)


def _not_by_rows(optimizer: keras.Optimizer, variable: keras.Variable, is_again: bool) -> UnsupportedError:
    if is_again:
        return UnsupportedError(
            "A table that an earlier step has used by rows may be updated once in a step. Received: several "
            f"updates by {optimizer.name!r} in one step, which train {variable.path!r}. Run that step first, "
            "so that the table is used as a whole, or schedule a function for each update."
        )
    return UnsupportedError(
        "A table on parameter servers must be trained by an optimizer that updates each row by this row's "
        f"gradient. Received: {type(optimizer).__name__} ({optimizer.name!r}) for {variable.path!r}, which "
        "an earlier step has used by rows. Train before you evaluate, or use an optimizer such as Adagrad."
    )
