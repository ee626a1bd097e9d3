"""The messages of a compiled program, read from XLA's text of it. Pure.

Tests: tests/unit/cli/test_replica_plan.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
_SIZES |= {"f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8, "c64": 8, "c128": 16}

_MESSAGE = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(.*")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(?:body|to_apply|calls|(?:true|false)_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{(.*?)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_DEFINED = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) (.*)")
_FIRST_OPERAND = re.compile(r"\((?:\S+ )?%?([\w.\-]+)[,)]")
_SAME = re.compile(r"(?:copy|transpose|bitcast|reshape|convert|fusion|call)\((?:\S+ )?%?([\w.\-]+)\)")
#: Operations between a parameter and its message that are followed.
_FOLLOWED = 6


class PlannedMessage(NamedTuple):
    """A collective of a compiled program.

    Args:
        kind: as XLA calls it.
        is_inside: whether the devices of a replica exchange, and not replicas.
        nbytes: of its result on each device.
        times: how often a step sends it; once for a loop whose length XLA does not know.
        is_in_loop: whether it is in a loop.
    """

    kind: str
    is_inside: bool
    nbytes: int
    times: int = 1
    is_in_loop: bool = False


def messages_of(program: str, size: int) -> list[PlannedMessage]:
    """Return the collectives of a compiled program.

    Args:
        program: XLA's text of it.
        size: devices of each replica.

    >>> text = "%a = f32[4,8]{1,0} all-reduce(%b), channel_id=1, replica_groups=[2,2]<=[4], to_apply=%c"
    >>> messages_of(text, 2)[0].nbytes
    128
    """
    times = _times(program)
    return [
        _message(found, size, *times.get(name, (1, False)))
        for name, line in _lines(program)
        if any(kind in line for kind in KINDS) and (found := _MESSAGE.search(line))
    ]


def gathered_parameters(program: str, size: int) -> list[tuple[int, ...]]:
    """Return the shapes of the parts of a program's parameters that devices of a replica send each other.

    A weight in parts is such a parameter: XLA puts it together where an operation cannot be divided as it
    lies. Results of computations are left out.
    """
    made: dict[str, tuple[str, str]] = {}
    for name, line in _lines(program):
        if found := _DEFINED.match(line):
            made[f"{name} {found[1]}"] = found[2], found[3]
    shapes = []
    for name, line in _lines(program):
        match = _MESSAGE.search(line)
        if match is None or match[2] in ("all-reduce", "reduce-scatter"):
            continue
        if not _message(match, size, 1, False).is_inside:
            continue
        operand = _FIRST_OPERAND.search(match[0])
        shape = _parameter(made, name, operand[1] if operand else "")
        if shape is not None:
            shapes.append(shape)
    return shapes


def _parameter(made: dict[str, tuple[str, str]], name: str, operand: str) -> tuple[int, ...] | None:
    """Return the shape of the parameter that an array is a copy of, perhaps in another order."""
    for _ in range(_FOLLOWED):
        shape, operation = made.get(f"{name} {operand}", ("", ""))
        if operation.startswith("parameter("):
            dims = re.search(r"\[([\d,]*)\]", shape)
            return tuple(int(n) for n in dims[1].split(",") if n) if dims else None
        same = _SAME.match(operation)
        if same is None:
            return None
        operand = same[1]
    return None


def _lines(program: str) -> Iterator[tuple[str, str]]:
    """Return each line with the name of its computation."""
    name = ""
    for line in program.splitlines():
        if found := _COMPUTATION.match(line):
            name = found[1]
        yield name, line


def _times(program: str) -> dict[str, tuple[int, bool]]:
    """Return by computation how often a step runs it, and whether it is in a loop."""
    calls: dict[str, list[tuple[str, int, bool]]] = {}
    entry = ""
    for name, line in _lines(program):
        if line.startswith("ENTRY"):
            entry = name
        is_loop = " while(" in line
        trips = _TRIPS.search(line) if is_loop else None
        # Most lines call nothing, and a program has tens of thousands.
        called = _CALLED.findall(line) if "=%" in line or "_computation" in line else []
        if branches := _BRANCHES.search(line):
            called += [each.strip().lstrip("%") for each in branches[1].split(",")]
        calls.setdefault(name, []).extend((c, int(trips[1]) if trips else 1, is_loop) for c in called)
    known = {entry: (1, False)}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        times, in_loop = known[name]
        for called_name, trips_of, is_loop in calls.get(name, []):
            # A program of XLA has no recursion.
            known[called_name] = times * trips_of, in_loop or is_loop
            waiting.append(called_name)
    return known


def _message(match: re.Match[str], size: int, times: int, is_in_loop: bool) -> PlannedMessage:
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
    sizes = [_SIZES.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in shapes]
    if match[3]:
        # One that is started and awaited returns its operands, too.
        sizes = sizes[len(sizes) // 2 :]
    members = _first_group(match[0])
    return PlannedMessage(match[2], len({n // size for n in members}) == 1, sum(sizes), times, is_in_loop)


def _first_group(line: str) -> list[int]:
    """Return the numbers of the devices of the first group of a collective."""
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", line)
    if listed is not None:
        return [int(n) for n in listed[1].split(",")]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota is None:
        return [0]
    lists = ([int(n) for n in text.split(",")] if text else [] for text in iota.groups())
    groups, dims, order = lists
    numbers = np.arange(math.prod(dims)).reshape(dims)
    return [int(n) for n in numbers.transpose(order or None).reshape(groups)[0]]
