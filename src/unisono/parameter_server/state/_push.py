"""What a worker's step changes on one server, and how that is written in a message or a log.

Tests: tests/unit/parameter_server/test_store.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._types import Json
from unisono.rpc._fields import ints, listed, mapping, text, whole

#: An array of any shape and dtype.
Array = np.ndarray[Any, Any]

#: Among so many of an iterator's newest batches it is known which ones are used: all earlier ones count as
#: used. A worker has eight closures under way at most.
_NEWEST = 1024

#: The bits of a closure's number below the generation of the chief that has made it.
COUNTER_BITS = 40


class UsedBatches:
    """Which batches of an iterator are in updates; they are numbered from 1 on.

    Pushes arrive in any order, and another worker may run the closure of a batch with one of its own.

    Args:
        count: the highest number that is used.
        left: the numbers below it that are not.

    >>> used = UsedBatches()
    >>> used.add(1); used.add(4); used.add(3)
    >>> used.count, used.left, 2 in used, 3 in used
    (4, {2}, False, True)
    """

    def __init__(self, count: int = 0, left: Iterable[int] = ()) -> None:
        self.count, self.left = count, {*left}

    def __contains__(self, number: int) -> bool:
        return 0 < number <= self.count and number not in self.left

    def add(self, number: int) -> None:
        """Note that a batch is used."""
        self.left.discard(number)
        if number > self.count:
            self.left.update(range(max(self.count + 1, number - _NEWEST), number))
            self.count = number
            if len(self.left) > _NEWEST:
                self.left = {n for n in self.left if n >= number - _NEWEST}

    def join(self, other: UsedBatches) -> None:
        """Note what another server has."""
        self.left = {n for n in self.left | other.left if n not in self and n not in other}
        self.count = max(self.count, other.count)

    def encode(self) -> list[int]:
        """Return it as JSON holds it."""
        return [self.count, *sorted(self.left)]

    @classmethod
    def decode(cls, meta: Mapping[str, Json], name: str) -> UsedBatches:
        """Read a field that `encode` has written.

        Files of development versions before 0.2.0 have the highest number alone: all below it count as used.
        """
        count, *left = _numbers(meta, name, 0) or (0,)
        return cls(count, left)


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramCall:
    """One call of an update program.

    Args:
        program: the digest of the program, a function of lists (values, slots, gradients) that returns new
            values and slots.
        slots: what else the program reads and writes: an optimizer's slots, `iterations`, the learning rate.
        gradients: as many as the program takes, in its order.
        indices: None, or the rows of all tables among `values` and `slots` that the program sees; each
            gradient has one row per index. Gradients of one row are added up.
    """

    program: str
    values: tuple[int, ...]
    slots: tuple[int, ...]
    gradients: tuple[Array, ...]
    indices: Array | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """The variables that the call writes."""
        return self.values + self.slots


@dataclasses.dataclass(frozen=True, eq=False)
class RowWrite:
    """New rows of tables, and values of dense variables: what a call with `indices` results in.

    Args:
        indices: the rows, each once.
        rows: for each table, one row per index.
        values: for each of these, its new value.
    """

    tables: tuple[int, ...]
    indices: Array
    rows: tuple[Array, ...]
    dense: tuple[int, ...] = ()
    values: tuple[Array, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """The variables that are written."""
        return self.tables + self.dense


@dataclasses.dataclass(frozen=True, eq=False)
class Push:
    """All that one closure changes on one server; it is applied once, as a whole or not at all.

    Args:
        closure: the number of the closure, by which a repeated push is recognized.
        watermark: closures with lower numbers are complete, and nothing of them will be pushed.
        updates: the calls of update programs, and new rows, in order.
        adds: what is added to variables, as pairs of a variable and an array.
        assigns: what replaces the values of variables, as pairs of a variable and an array.
        used: the batches of workers' datasets in it: the names of their iterators, and their numbers.

    >>> push = Push(7, adds=((0, np.ones(2)),))
    >>> meta, arrays = push.encode()
    >>> Push.decode(meta, arrays).adds
    ((0, array([1., 1.])),)
    """

    closure: int
    watermark: int = 0
    updates: tuple[ProgramCall | RowWrite, ...] = ()
    adds: tuple[tuple[int, Array], ...] = ()
    assigns: tuple[tuple[int, Array], ...] = ()
    used: tuple[tuple[str, int], ...] = ()

    @property
    def room(self) -> int:
        """The bytes that a log needs for the push at most: of its arrays, or of the new rows."""
        total = sum(a.nbytes for _, a in self.adds) + sum(a.nbytes for _, a in self.assigns)
        for update in self.updates:
            if isinstance(update, RowWrite):
                total += update.indices.nbytes + sum(a.nbytes for a in (*update.rows, *update.values))
            elif update.indices is None:
                total += sum(a.nbytes for a in update.gradients)
            else:
                rows = max((g.nbytes for g in update.gradients), default=0)
                total += 8 * update.indices.size + len(update.ids) * (rows + 64)
        return total

    def encode(self) -> tuple[dict[str, Json], list[Array]]:
        """Return the push as something that JSON can hold, and a list of arrays."""
        encoded = [_encode_update(u) for u in self.updates]
        arrays = [a for _, own in encoded for a in own]
        arrays += [a for _, a in self.adds]
        arrays += [a for _, a in self.assigns]
        meta: dict[str, Json] = {
            "closure": self.closure,
            "watermark": self.watermark,
            "updates": [u for u, _ in encoded],
            "adds": [i for i, _ in self.adds],
            "assigns": [i for i, _ in self.assigns],
        }
        if self.used:
            meta["used"] = {name: [n for other, n in self.used if other == name] for name, _ in self.used}
        return meta, arrays

    @classmethod
    def decode(cls, meta: Mapping[str, Json], arrays: Sequence[Array]) -> Push:
        """Return the push that `encode` has written."""
        left = list(arrays)
        updates = tuple(_decode_update(u, left) for u in listed(meta, "updates"))
        adds, assigns = ints(meta, "adds"), ints(meta, "assigns")
        if len(left) != len(adds) + len(assigns):
            raise InvalidArgumentError(
                f"A push must have the arrays that it names. Received: {len(arrays)} arrays, "
                f"{len(left)} of them for {len(adds)} `adds` and {len(assigns)} `assigns`."
            )
        return cls(
            closure=whole(meta, "closure"),
            watermark=whole(meta, "watermark"),
            updates=updates,
            adds=tuple(zip(adds, left, strict=False)),
            assigns=tuple(zip(assigns, left[len(adds) :], strict=True)),
            used=_used(meta),
        )


def _used(meta: Mapping[str, Json]) -> tuple[tuple[str, int], ...]:
    if "used" not in meta:
        return ()
    used = mapping(meta, "used")
    return tuple((name, number) for name in used for number in _numbers(used, name, 1))


def _numbers(meta: Mapping[str, Json], name: str, least: int) -> tuple[int, ...]:
    value = meta.get(name)
    numbers = ints({name: value if isinstance(value, list) else [value]}, name)
    if min(numbers, default=least) < least:
        raise InvalidArgumentError(f"Batches are numbered from 1 on. Received: `{name}` {value!r}.")
    return numbers


def _encode_update(update: ProgramCall | RowWrite) -> tuple[dict[str, Json], list[Array]]:
    if isinstance(update, RowWrite):
        meta: dict[str, Json] = {"tables": update.tables, "dense": update.dense}
        return meta, [update.indices, *update.rows, *update.values]
    meta = {
        "program": update.program,
        "values": update.values,
        "slots": update.slots,
        "gradients": len(update.gradients),
        "sparse": update.indices is not None,
    }
    return meta, [*([] if update.indices is None else [update.indices]), *update.gradients]


def _decode_update(meta: Json, left: list[Array]) -> ProgramCall | RowWrite:
    """Read one update, and take its arrays from the front of `left`."""
    if not isinstance(meta, dict):
        raise InvalidArgumentError(f"Each of `updates` must be an object. Received: {meta!r}.")
    if "tables" in meta:
        tables, dense = ints(meta, "tables"), ints(meta, "dense")
        own = _taken(left, 1 + len(tables) + len(dense))
        count = 1 + len(tables)
        return RowWrite(tables, own[0], tuple(own[1:count]), dense, tuple(own[count:]))
    sparse = bool(meta.get("sparse"))
    own = _taken(left, whole(meta, "gradients") + sparse)
    return ProgramCall(
        program=text(meta, "program"),
        values=ints(meta, "values"),
        slots=ints(meta, "slots"),
        gradients=tuple(own[1:] if sparse else own),
        indices=own[0] if sparse else None,
    )


def _taken(left: list[Array], count: int) -> list[Array]:
    if count > len(left):
        raise InvalidArgumentError(
            f"A push must have the arrays that it names. Received: {len(left)} arrays where an update of "
            f"`updates` needs {count}."
        )
    own = left[:count]
    del left[:count]
    return own
