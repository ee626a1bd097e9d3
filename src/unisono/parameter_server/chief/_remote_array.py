"""What a variable holds whose value lies on servers: where it is, and how the chief reads and writes it.

Tests: tests/virtual/parameter_server/chief/test_remote_array.py.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono.parameter_server.chief._placement import Division, VariablePart
from unisono.parameter_server.server._client import Key, ServerClient, key_of
from unisono.rpc._ops import Op
from unisono.step._keras_internals import stored_dtype
from unisono.step._value_handle import RowsHandle

#: Bytes of a table that travel at once where all of it is read.
_PIECE = 8 << 20


class RemoteArray(RowsHandle):
    """Stands for a variable's array that lies on servers.

    Each read asks the servers, each assignment goes to them: no copy here can be out of date.

    Args:
        division: which of its rows lie on which server.
        settle: is called before a value is read or written, and returns when no step runs any more.
        is_table: whether the servers change it by rows.
    """

    def __init__(
        self,
        variable: keras.Variable,
        division: Division,
        client: ServerClient,
        settle: Callable[[], None],
        is_table: bool = False,
    ) -> None:
        super().__init__(tuple(variable.shape), jnp.dtype(stored_dtype(variable)))
        self.variable, self.division, self.is_table = variable, division, is_table
        self._client, self._settle = client, settle
        #: The numbers of its parts on their servers.
        self.numbers: dict[VariablePart, int] = {}

    @property
    def homes(self) -> tuple[int, ...]:
        """The servers."""
        return self.division.servers

    def keys(self, rounded: str | None = None) -> list[Key]:
        """Return from where it is pulled: the value is these, joined."""
        return [key_of(part.server, self.numbers[part], rounded) for part in self.division.pulled]

    def whole(self) -> jax.Array:
        """Return the value that the servers hold now."""
        self._settle()
        if self.is_table:
            return jnp.asarray(self._table(), self.dtype)
        return jnp.asarray(self.division.joined(self._client.pull(self.keys()).result()), self.dtype)

    def _table(self) -> np.ndarray:
        """Return all rows of a table, which travel in pieces: there is one copy of it here."""
        whole = np.empty(self.shape, self.dtype)
        row = max(1, whole.nbytes // max(1, len(whole)))
        step = max(1, _PIECE // row)
        for part in self.division.pulled:
            begin, end = part.rows or (0, len(whole))
            for at in range(begin, end, step):
                last = min(at + step, end)
                meta = {"id": self.numbers[part], "begin": at - begin, "end": last - begin}
                whole[at:last] = self._client.call(part.server, Op.READ, meta).arrays[0]
        return whole

    def is_deleted(self) -> bool:
        """Return False: no step is given the servers' arrays."""
        return False

    def assigned(self, value: jax.Array) -> RemoteArray:
        """Send a value to all servers; the variable holds what it held."""
        self._settle()
        whole = np.asarray(value)
        for part, number in self.numbers.items():
            self._client.write((part.server, number), part.of(whole))
        return self

    def rows(self, begin: int, end: int) -> np.ndarray:
        """Return rows from the servers that hold them."""
        self._settle()
        asked = [
            self._client.send(part.server, Op.READ, {"id": self.numbers[part], "begin": first, "end": last})
            for part, first, last in self.division.spans(begin, end)
        ]
        nothing = np.empty((0, *self.shape[1:]), self.dtype)
        return np.concatenate([nothing, *(answer.result().arrays[0] for answer in asked)])

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Return rows from the servers that hold them."""
        self._settle()
        rows = np.empty((len(indices), *self.shape[1:]), self.dtype)
        asked = [
            (at, self._client.send(part.server, Op.ROWS, {"ids": [self.numbers[part]]}, [own]))
            for part, at, own in self.division.located(indices)
        ]
        for at, answer in asked:
            rows[at] = answer.result().arrays[0]
        return rows

    def write_rows(self, begin: int, value: jax.Array) -> None:
        """Send rows to the servers that hold them; not for a variable with copies."""
        self._settle()
        rows, written = np.asarray(value), 0
        for part, first, last in self.division.spans(begin, begin + len(rows)):
            own = rows[written : written + last - first]
            meta = {"ids": [self.numbers[part]], "begin": first}
            self._client.call(part.server, Op.WRITE, meta, [own])
            written += last - first

    def __deepcopy__(self, memo: dict[int, object]) -> jax.Array:
        # A copied variable is another one, which no server knows.
        return self.whole()

    def __repr__(self) -> str:
        return f"<on servers: {self.variable.path!r} {self.dtype}{list(self.shape)}>"
