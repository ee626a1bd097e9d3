"""Rows of tables on a worker: which a step needs, from which server they come, and where their gradients go.

Each row travels once, however often a step looks it up. Programs get as many places for rows as a power of
two, so that few of them are compiled: a step never gets fewer places than it has had before.

Tests: tests/unit/parameter_server/worker/test_table_rows.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from unisono.parameter_server.server._client import Key, key_of

#: An array of any shape and dtype.
Array = np.ndarray[Any, Any]

#: Asks a server for rows of variables, by an array of indices for each.
AskRows = Callable[[Sequence[Key], Sequence[Array]], Future[list[Array]]]

#: The place of a number that is none of a row: behind every row, so that a lookup gives NaN.
NO_PLACE = int(np.iinfo(np.int32).max)

#: Places for rows at least, and at least this part of the numbers that a step looks up.
_FEWEST_PLACES = 8
_LEAST_PART = 8


@dataclasses.dataclass(frozen=True)
class TablePart:
    """Rows of a table on one server."""

    server: int
    number: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """A table.

    Args:
        parts: where its rows are, in their order.
        rounded: the type to which rows are rounded before they are sent; None where they are not.
    """

    parts: tuple[TablePart, ...]
    row: tuple[int, ...]
    dtype: str
    rounded: str | None = None


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """Tables of which a step uses the same rows."""

    size: int
    tables: tuple[TablePlan, ...]


@dataclasses.dataclass(frozen=True)
class LookupPlan:
    """How a worker finds the rows of a step.

    Args:
        digest: of the program that computes the numbers of rows, empty where there is none.
        sites: for each array of numbers its group, and whether a number that is none of a row stands for the
            nearest one.
    """

    digest: str
    takes: tuple[int, ...]
    groups: tuple[GroupPlan, ...]
    sites: tuple[tuple[int, bool], ...]

    @classmethod
    def from_meta(cls, meta: Any) -> LookupPlan:
        """Return the plan that `dataclasses.asdict` has turned into something that JSON can hold."""
        groups = tuple(
            GroupPlan(
                group["size"],
                tuple(
                    TablePlan(
                        tuple(TablePart(**p) for p in t["parts"]), tuple(t["row"]), t["dtype"], t["rounded"]
                    )
                    for t in group["tables"]
                ),
            )
            for group in meta["groups"]
        )
        sites = tuple((group, clamps) for group, clamps in meta["sites"])
        return cls(meta["digest"], tuple(meta["takes"]), groups, sites)


@dataclasses.dataclass(frozen=True)
class RowPush:
    """What a step pushes for one part of a table: the numbers of its rows there, then an array of rows each.

    Args:
        group: of the table; -1 for all rows of the part.
        outputs: which outputs of the program travel: by rows, or numbers, one of which goes with each row.
    """

    group: int
    begin: int
    end: int
    outputs: tuple[int, ...]


class RowNumbers:
    """The rows that a step uses, each once, in ascending order.

    Args:
        found: what the program has computed: an array of numbers for each lookup.

    >>> group = GroupPlan(10, ())
    >>> numbers = RowNumbers(LookupPlan("", (), (group,), ((0, False),)), [np.array([7, 2, 7, 11])])
    >>> numbers.rows[0].tolist(), numbers.places[0].tolist() == [1, 0, 1, NO_PLACE]
    ([2, 7], True)
    """

    def __init__(self, plan: LookupPlan, found: Sequence[Any]) -> None:
        self._plan = plan
        #: For each group, its rows.
        self.rows: list[Array] = [np.empty(0, np.int64)] * len(plan.groups)
        #: For each lookup, the places of its rows among these.
        self.places: list[Array] = [np.empty(0, np.int32)] * len(plan.sites)
        #: For each group, how many numbers are looked up.
        self.asked = [0] * len(plan.groups)
        for group in range(len(plan.groups)):
            own = [i for i, (of, _) in enumerate(plan.sites) if of == group]
            self._find(group, own, [np.asarray(found[i]) for i in own])

    def _find(self, group: int, sites: Sequence[int], arrays: Sequence[Array]) -> None:
        size = self._plan.groups[group].size
        flat = [
            np.clip(a.reshape(-1), 0, size - 1) if self._plan.sites[i][1] else a.reshape(-1)
            for i, a in zip(sites, arrays, strict=True)
        ]
        numbers = np.concatenate([np.empty(0, np.int64), *flat]).astype(np.int64, copy=False)
        is_row = (numbers >= 0) & (numbers < size)
        self.rows[group], inverse = np.unique(numbers[is_row], return_inverse=True)
        places = np.full(numbers.shape, NO_PLACE, np.int32)
        places[is_row] = inverse
        self.asked[group] = numbers.size
        for i, part in zip(sites, np.split(places, np.cumsum([a.size for a in arrays])[:-1]), strict=True):
            self.places[i] = part.reshape(np.shape(arrays[sites.index(i)]))

    def part(self, group: int, begin: int, end: int) -> slice:
        """Return which of a group's rows lie in a part of the table."""
        low, high = np.searchsorted(self.rows[group], (begin, end))
        return slice(int(low), int(high))


class TableRows:
    """Brings rows of tables to the steps of a worker."""

    def __init__(self, ask: AskRows) -> None:
        self._ask = ask
        #: By plan and group, how many places there were for its rows.
        self._places: dict[tuple[LookupPlan, int], int] = {}

    def pull(self, plan: LookupPlan, numbers: RowNumbers) -> list[Any]:
        """Ask each server once for rows, and wait; return what the step's program takes of tables."""
        wanted: dict[int, list[tuple[Key, Array, int, int, slice]]] = {}
        for group, tables in enumerate(plan.groups):
            for number, table in enumerate(tables.tables):
                for part in table.parts:
                    where = numbers.part(group, part.begin, part.end)
                    if where.start < where.stop:
                        key = key_of(part.server, part.number, table.rounded)
                        indices = numbers.rows[group][where] - part.begin
                        wanted.setdefault(part.server, []).append((key, indices, group, number, where))
        asked = [
            (own, self._ask([key for key, *_ in own], [indices for _, indices, *_ in own]))
            for own in wanted.values()
        ]
        rows: list[list[Array]] = []
        for group, tables in enumerate(plan.groups):
            room = self._room(plan, group, numbers)
            rows.append([np.zeros((room, *table.row), np.dtype(table.dtype)) for table in tables.tables])
        for own, answer in asked:
            for (_, _, group, number, where), found in zip(own, answer.result(), strict=True):
                rows[group][number][where] = found
        given: list[Any] = []
        for tables_rows, used in zip(rows, numbers.rows, strict=True):
            given += [*tables_rows, np.int32(len(used))]
        return [*given, *numbers.places]

    def _room(self, plan: LookupPlan, group: int, numbers: RowNumbers) -> int:
        """Return the number of places for the rows of a group: it does not become smaller."""
        needed = max(len(numbers.rows[group]), numbers.asked[group] // _LEAST_PART, _FEWEST_PLACES)
        room = max(1 << (needed - 1).bit_length(), self._places.get((plan, group), 0))
        self._places[plan, group] = room
        return room


def pushed_rows(
    pushes: Sequence[RowPush], numbers: RowNumbers | None, outputs: Sequence[Any], updates: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Return the arrays of a push that belong to tables, and the updates without those of no row.

    Args:
        pushes: for each part of a table.
        numbers: of the rows that the step uses; None for a step that uses no table by rows.
        updates: what the server does: of each part of a table, then of all else.
    """
    arrays: list[Any] = []
    kept = []
    for push, update in zip(pushes, updates, strict=False):
        if numbers is None or push.group < 0:
            where, indices = slice(push.begin, push.end), np.arange(push.end - push.begin)
        else:
            where = numbers.part(push.group, push.begin, push.end)
            indices = numbers.rows[push.group][where] - push.begin
        if not len(indices):
            continue
        kept.append(update)
        arrays.append(indices)
        for i in push.outputs:
            output = np.asarray(outputs[i])
            arrays.append(output[where] if output.ndim else np.full(indices.shape, output))
    return arrays, [*kept, *updates[len(pushes) :]]
