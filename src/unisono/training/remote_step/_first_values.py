"""How values come to servers and from there: whole, in pieces, or made on the server.

Tests: tests/virtual/strategies/test_parameter_server_tables.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from unisono.ps._client import ServerClient
from unisono.ps._placement import Division, VariablePart
from unisono.ps.state._create import NewVariable
from unisono.ps.state._variables import DENSE, TABLE, StoredSpec
from unisono.rpc._ops import Op
from unisono.step._value_handle import ValueHandle, VariableValue
from unisono.step.variables._deferred_value import DeferredValue
from unisono.training.tables._row_initial import RowInitializer, rows_of

#: Bytes of a table that travel at once where all of it is read.
_PIECE = 8 << 20


class FirstValue:
    """The first value of a variable.

    Args:
        value: an array; or what stands for one that was not made yet.
    """

    def __init__(self, value: VariableValue | np.ndarray, is_table: bool) -> None:
        self._kind = TABLE if is_table else DENSE
        self._fill = value.fill if isinstance(value, DeferredValue) else None
        self._rows: RowInitializer | None = None
        if isinstance(value, DeferredValue) and self._fill is None:
            self._rows = rows_of(value)
        self._size, self._type = tuple(value.shape), np.dtype(value.dtype)
        self._whole = None if self._rows is not None or self._fill is not None else np.asarray(value)

    def on_server(self, name: str, part: VariablePart, client: ServerClient) -> NewVariable:
        """Return what a server gets of its part; it has the program then that makes it."""
        spec = StoredSpec(name, part.shape(self._size), self._type.name, self._kind)
        if self._fill is not None:
            return NewVariable(spec, fill=self._fill)
        if self._rows is None:
            return NewVariable(spec, np.asarray(part.of(self._whole)))
        program = self._rows.program(0 if part.rows is None else part.rows[0])
        return NewVariable(spec, initializer=client.add_program(part.server, program))


def read_table(
    client: ServerClient, division: Division, numbers: Mapping[VariablePart, int], held: ValueHandle
) -> np.ndarray:
    """Return all rows of a table, which travel in pieces: there is one copy of it here."""
    whole = np.empty(held.shape, held.dtype)
    row = max(1, whole.nbytes // max(1, len(whole)))
    step = max(1, _PIECE // row)
    for part in division.pulled:
        begin, end = part.rows or (0, len(whole))
        for at in range(begin, end, step):
            last = min(at + step, end)
            meta = {"id": numbers[part], "begin": at - begin, "end": last - begin}
            whole[at:last] = client.call(part.server, Op.READ, meta).arrays[0]
    return whole
