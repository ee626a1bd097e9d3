"""Checksums of what a server keeps in files: of bytes, and of each row of a table.

XXH3 takes 0.029 ms of a processor for 1 MB, `zlib.crc32` 0.33 (2 cores, 2026-11-28); the rows of a table
have one each, so that an update computes those of its own rows alone.

Tests: tests/unit/parameter_server/test_checksums.py.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from unisono._system._packages import require_packages
from unisono.parameter_server.state._push import Array

# JAX needs the second one to send programs.
require_packages("A parameter server", "cluster", "xxhash", "flatbuffers")

import xxhash  # noqa: E402

#: Bytes are taken in pieces of this size, each after the one before: a writer need not hold all of them.
PIECE = 8 << 20


def checksum(data: Array | bytes, before: int = 0) -> int:
    """Return the checksum of bytes, 64 bits.

    Args:
        data: bytes, or an array of bytes in one piece of memory.
        before: the checksum of the bytes before these, which are whole pieces; 0 for none.

    >>> checksum(b"1") != checksum(b"2"), checksum(b"2", checksum(b"1")) != checksum(b"2")
    (True, True)
    """
    for at in range(0, len(data), PIECE):
        piece: Any = data[at : at + PIECE]  # NumPy's arrays have no type of a buffer before Python 3.12
        before = xxhash.xxh3_64_intdigest(piece, before)
    return before


def row_checksums(rows: Array) -> Array:
    """Return the checksum of each row, 32 bits; that of zeros is 0, as new memory holds them.

    A sum of words, each times an odd number of its own: any word that differs changes it.

    >>> row_checksums(np.array([[0.0, 0.0], [1.0, 2.0]], "float32")).tolist()[0]
    0
    """
    row_bytes = rows.nbytes // len(rows) if len(rows) else 0
    whole = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).reshape(len(rows), row_bytes)
    words = whole if row_bytes % 4 else whole.view(np.uint32)
    sums: Array = np.einsum("ij,j->i", words, _factors(words.shape[1]), dtype=np.uint32, casting="unsafe")
    return sums


@functools.lru_cache(maxsize=64)
def _factors(count: int) -> Array:
    # The raw numbers of a generator are the same in all versions of NumPy.
    return np.random.PCG64(23).random_raw(count).astype(np.uint32) | np.uint32(1)
