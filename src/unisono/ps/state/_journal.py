"""Where a server notes its changes before it applies them.

Tests: tests/unit/ps/test_store.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from unisono._types import Json
from unisono.ps.state._push import Array
from unisono.ps.state._variables import StoredSpec


@dataclasses.dataclass(frozen=True, eq=False)
class TableMemory:
    """Where a table lies.

    Args:
        rows: of the variable's shape and dtype.
        checksums: one for each row; None where they need none.
    """

    rows: Array
    checksums: Array | None = None
    is_filled: bool = False


class Journal:
    """Where changes are noted before they are applied.

    This one keeps nothing: what is not in a snapshot is lost with the process.
    """

    def __init__(self) -> None:
        self._scratch = np.empty(0, np.uint8)

    def begin(self, nbytes: int, recurs: bool = False) -> None:
        """Make room for a change, whose arrays have so many bytes; the state is complete at this moment."""

    def stage(self, arrays: Sequence[Array]) -> list[Array]:
        """Take the next arrays of a change; return them as programs read them without a copy of their own.

        Args:
            arrays: of a message, whose memory is not aligned.
        """
        large = [a for a in arrays if a.nbytes >= 1 << 20]
        begin = 0
        if sum(a.nbytes + 64 for a in large) > self._scratch.nbytes - 64:
            self._scratch = np.empty(sum(a.nbytes + 64 for a in large) + 64, np.uint8)
        begin = -self._scratch.ctypes.data % 64
        staged = []
        for array in arrays:
            if array.nbytes < 1 << 20:
                staged.append(array)
                continue
            # JAX copies an unaligned array into new pages: 52 ms for 80 MB instead of 18 (2026-11-22).
            place = self._scratch[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(place, array)
            staged.append(place)
            begin += -(-array.nbytes // 64) * 64
        return staged

    def commit(self, kind: str, meta: dict[str, Json]) -> None:
        """Complete a change: it is not lost from here on."""

    def abort(self) -> None:
        """Forget what was staged."""

    def table(self, key: str, spec: StoredSpec) -> TableMemory:
        """Return memory for a table, of zeros, or with its rows."""
        return TableMemory(np.zeros(spec.shape, spec.dtype))

    def keep_program(self, digest: str, blob: bytes) -> None:
        """Keep a program."""
