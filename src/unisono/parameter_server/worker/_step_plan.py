"""How a worker runs a program: what it pulls, what it gives the program, and what goes where.

Tests: tests/unit/parameter_server/worker/test_step_worker.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypedDict

from unisono.parameter_server.server._client import Key, key_of
from unisono.parameter_server.worker._table_rows import LookupPlan, RowPush

#: Stands in a plan for the worker's own number, among the arrays of a closure.
OWN_INDEX = -1


class UpdateMeta(TypedDict):
    """One call of an update program, as a server reads it; see `parameter_server/state/_push.ProgramCall`."""

    program: str
    values: list[int]
    slots: list[int]
    gradients: int
    sparse: bool


class PushMeta(TypedDict):
    """A push, as a server reads it: updates, and the variables that arrays are added to or replace."""

    updates: list[UpdateMeta]
    adds: list[int]
    assigns: list[int]


@dataclasses.dataclass(frozen=True)
class PushPlan:
    """What a program pushes to one server.

    Args:
        outputs: which outputs of the program travel, in this order.
        rows: what travels before these, of tables.
    """

    server: int
    outputs: tuple[int, ...]
    meta: PushMeta
    rows: tuple[RowPush, ...] = ()


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """How a worker runs a program.

    Args:
        pulls: the variables whose values are its first arguments.
        states: how many states of random generators follow, the first arrays of the closure.
        arrays: which of the other arrays follow: those of the closure, then those of batches taken here; or
            `OWN_INDEX`.
        lookups: how the rows of tables are found that are its last arguments; None without tables.
    """

    digest: str
    pulls: tuple[Key, ...]
    states: int
    arrays: tuple[int, ...]
    pushes: tuple[PushPlan, ...]
    results: tuple[int, ...]
    lookups: LookupPlan | None = None

    def to_meta(self) -> dict[str, Any]:
        """Return the plan as JSON holds it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_meta(cls, meta: Any) -> StepPlan:
        """Return the plan of what `to_meta` returned."""
        pushes = []
        for p in meta["pushes"]:
            rows = tuple(RowPush(r["group"], r["begin"], r["end"], tuple(r["outputs"])) for r in p["rows"])
            pushes.append(PushPlan(p["server"], tuple(p["outputs"]), p["meta"], rows))
        return cls(
            meta["digest"],
            tuple(key_of(*key) for key in meta["pulls"]),
            meta["states"],
            tuple(meta["arrays"]),
            tuple(pushes),
            tuple(meta["results"]),
            None if meta["lookups"] is None else LookupPlan.from_meta(meta["lookups"]),
        )
