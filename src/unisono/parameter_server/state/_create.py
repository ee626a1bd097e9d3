"""How variables come into being: a value, one number for all elements, or a program.

Tests: tests/unit/parameter_server/test_store.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._types import Json
from unisono.parameter_server.server._programs import ExportedProgram, ProgramStore
from unisono.parameter_server.state._journal import Journal
from unisono.parameter_server.state._push import Array
from unisono.parameter_server.state._variables import TABLE, DenseVariable, StoredSpec, Table


@dataclasses.dataclass(frozen=True, eq=False)
class NewVariable:
    """A variable to create.

    Args:
        value: its initial value; None for `fill` or `initializer`.
        initializer: the digest of a program without arguments that returns the value; for tables also of
            one that gets a row's number and returns rows from there on.
    """

    spec: StoredSpec
    value: Array | None = None
    fill: float = 0.0
    initializer: str | None = None

    def make(self, key: str, programs: ProgramStore, journal: Journal) -> DenseVariable | Table:
        """Return the variable with its initial value."""
        spec = self.spec
        if self.value is not None and (self.value.shape != spec.shape or self.value.dtype != spec.dtype):
            raise InvalidArgumentError(
                f"An initial value must have the variable's shape and dtype. Received: {self.value.shape}, "
                f"{self.value.dtype} for {spec}."
            )
        program = None if self.initializer is None else programs[self.initializer]
        if spec.kind == TABLE:
            memory = journal.table(key, spec)
            table = Table(spec, memory.rows, checksums=memory.checksums)
            # New memory holds zeros that take no room until something else is written.
            if not memory.is_filled and (self.value is not None or program is not None or self.fill):
                self._fill(memory.rows, program)
                table.seal()
            return table
        value = np.empty(spec.shape, spec.dtype)
        self._fill(value, program)
        return DenseVariable(spec, value)

    def _fill(self, memory: Array, program: ExportedProgram | None) -> None:
        if self.value is not None:
            memory[...] = self.value
        elif program is None:
            memory[...] = self.fill
        elif program.exported.in_avals:
            _fill_by_rows(memory, program)
        else:
            memory[...] = _checked(np.asarray(jax.tree.leaves(program())[0]), memory.shape, memory.dtype)


def _fill_by_rows(memory: Array, program: ExportedProgram) -> None:
    """Write what a program returns from row 0 on, then from the next row on, until all are there."""
    begin = 0
    while begin < len(memory):
        rows = np.asarray(jax.tree.leaves(program(np.int32(begin)))[0])
        count = max(1, rows.shape[0] if rows.ndim else 0)
        _checked(rows, (count, *memory.shape[1:]), memory.dtype)
        memory[begin : begin + count] = rows[: len(memory) - begin]
        begin += count


def _checked(value: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    if value.shape != shape or value.dtype != dtype:
        raise InvalidArgumentError(
            f"An initializer must return values of shape {shape} and dtype {dtype}. Received: shape "
            f"{value.shape}, dtype {value.dtype}."
        )
    return value


def encode_news(news: Sequence[NewVariable]) -> tuple[list[dict[str, Json]], list[Array]]:
    """Return variables to create as something that JSON can hold, and the arrays of their values."""
    meta = [
        new.spec.encode()
        | {"has_array": new.value is not None, "fill": new.fill, "initializer": new.initializer}
        for new in news
    ]
    return meta, [new.value for new in news if new.value is not None]


def decode_news(variables: Sequence[Json], arrays: Sequence[Array]) -> list[NewVariable]:
    """Return the variables that `encode_news` has written."""
    left, news = list(arrays), []
    for meta in variables:
        spec = StoredSpec.decode(meta)
        fill, initializer, value = meta.get("fill", 0.0), meta.get("initializer"), None
        if not isinstance(fill, (int, float)) or not isinstance(initializer, str | None):
            raise InvalidArgumentError(
                f"A variable's `fill` must be a number and its `initializer` a program's digest. Received: "
                f"{fill!r} and {initializer!r} for {spec.name!r}."
            )
        if meta.get("has_array"):
            if not left:
                raise InvalidArgumentError(f"An initial value is missing. Received: none for {spec.name!r}.")
            value = left.pop(0)
        news.append(NewVariable(spec, value, fill, initializer))
    if left:
        raise InvalidArgumentError(
            f"Each array must be the initial value of a variable. Received: {len(left)} more."
        )
    return news
