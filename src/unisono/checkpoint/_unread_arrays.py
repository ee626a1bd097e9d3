"""Large arrays of a checkpoint that is being restored: each is read where it is needed, and not before.

So that a process holds one of them and its own parts of the others, and never the whole. Of several workers
the first may read for all: then each array is sent when all of them read it.

Tests: tests/unit/checkpoint/test_unread_arrays.py, tests/virtual/strategies/test_sharded_workers.py.
"""

from __future__ import annotations

import abc
import math
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from unisono._errors import CheckpointError
from unisono.collectives._process_group import ProcessGroup

if TYPE_CHECKING:
    from jax.typing import DTypeLike

#: Bytes that are read or sent at once: more would need as much memory again, and again where it is sent.
_PIECE = 1 << 26


class UnreadArray(abc.ABC):
    """Stands for an array of a checkpoint; `np.asarray` reads it into new memory each time."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)
        self.nbytes = math.prod(shape) * dtype.itemsize

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        array = np.empty(self.shape, self.dtype)
        # Python's buffers know nothing of some types.
        memory = array.reshape(-1).view(np.uint8)
        for begin in range(0, self.nbytes, _PIECE):
            end = min(begin + _PIECE, self.nbytes)
            memory[begin:end] = np.frombuffer(self.piece(begin, end), np.uint8)
        return array if dtype is None else array.astype(dtype, copy=False)

    @abc.abstractmethod
    def piece(self, begin: int, end: int) -> bytes:
        """Return some of the array's bytes."""


class ReadableFile:
    """A file that can be read at any place, also when its name is gone."""

    #: True if the system can do so.
    is_possible = hasattr(os, "pread")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, size: int, at: int) -> bytes:
        """Return some bytes.

        Raises:
            CheckpointError: the file is shorter, or the disk fails.
        """
        try:
            data = os.pread(self._descriptor, size, at)
        except OSError as error:
            raise unreadable(f"{error} at {self._path}") from error
        if len(data) != size:
            raise unreadable(f"{self._path}, which ends before byte {at + size}")
        return data


def unreadable(what: str) -> CheckpointError:
    """Return the error for arrays that cannot be read."""
    return CheckpointError(
        f"The arrays of a checkpoint must be readable. Received: {what}. Restore an earlier one."
    )


class FileArray(UnreadArray):
    """An array that lies in a file."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, file: ReadableFile, at: int) -> None:
        super().__init__(shape, dtype)
        self._file, self._at = file, at

    def piece(self, begin: int, end: int) -> bytes:
        """Read some of the array's bytes."""
        return self._file.read(end - begin, self._at + begin)


class SentArray(UnreadArray):
    """An array that the first worker sends when all workers read it."""

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, group: ProcessGroup, own: UnreadArray | None = None
    ) -> None:
        super().__init__(shape, dtype)
        self._group, self._own = group, own

    def piece(self, begin: int, end: int) -> bytes:
        """Send or receive some of the array's bytes: a collective.

        Raises:
            CheckpointError: on the first worker, which cannot read them.
            ClusterError: then on the others.
        """
        own = self._own
        return self._group.from_chief(lambda: b"" if own is None else own.piece(begin, end))
