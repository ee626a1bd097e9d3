"""The files of a launch, read as they grow: each byte once.

Tests: tests/unit/watch/test_job_reader.py.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

#: Bytes of a file that are read at once.
_CHUNK = 1 << 18
#: A line that is longer is none of ours, and passed over.
_LONGEST = 1 << 16
#: Received bytes of a file that are kept in memory.
_IN_MEMORY = 1 << 20


class LogFolder(Protocol):
    """The log folder of a launch, here or elsewhere."""

    @property
    def name(self) -> str:
        """Its name for people."""

    def names(self, folder: str) -> Sequence[str]:
        """Return the names of the files in a folder below it."""

    def read(self, name: str, start: int, most: int) -> bytes:
        """Return bytes of a file from a position on; none where there are none, or no such file."""

    def size(self, name: str) -> int:
        """Return the bytes of a file; 0 where there is none."""

    def changed_at(self, name: str) -> float | None:
        """Return when a file was last written, in seconds since the epoch; None where there is none."""


class LocalFolder:
    """A log folder in a file system of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def name(self) -> str:
        """Its name for people."""
        return str(self.root)

    def names(self, folder: str) -> Sequence[str]:
        """Return the names of the files in a folder below it."""
        with contextlib.suppress(OSError):
            return sorted(os.listdir(self.root / folder))
        return ()

    def read(self, name: str, start: int, most: int) -> bytes:
        """Return bytes of a file from a position on; none where there are none, or no such file."""
        with contextlib.suppress(OSError), (self.root / name).open("rb") as file:
            file.seek(start)
            return file.read(most)
        return b""

    def size(self, name: str) -> int:
        """Return the bytes of a file; 0 where there is none."""
        with contextlib.suppress(OSError):
            return (self.root / name).stat().st_size
        return 0

    def changed_at(self, name: str) -> float | None:
        """Return when a file was last written; None where there is none."""
        with contextlib.suppress(OSError):
            return (self.root / name).stat().st_mtime
        return None


class ReceivedBytes:
    """Bytes that were received once, and are read at any position: in memory, or in a file if they are many.

    >>> received = ReceivedBytes()
    >>> received.append(b"abc"); received.append(b"de")
    >>> received.read(1, 3), received.size
    (b'bcd', 5)
    >>> received.close()
    """

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 (`close` ends it)
        self.size = 0

    def append(self, data: bytes) -> None:
        """Add bytes at the end."""
        self._file.seek(self.size)
        self._file.write(data)
        self.size += len(data)

    def read(self, start: int, most: int) -> bytes:
        """Return bytes from a position on."""
        self._file.seek(start)
        return self._file.read(most)

    def close(self) -> None:
        """Forget them."""
        self._file.close()
        self.size = 0


class NewLines:
    """The complete lines of a file that no call has given yet.

    Args:
        name: of the file, below the folder.
    """

    def __init__(self, folder: LogFolder, name: str) -> None:
        self._folder, self._name = folder, name
        self._position, self._rest = 0, b""
        #: Bytes that were read, and whether the last call has left some.
        self.bytes_read, self.has_more = 0, False

    def read(self, most: int | None = None) -> Iterator[str]:
        """Give the lines that are new, where that is asked for of so many bytes, more or less.

        The last line, which may be half written, is given when it is complete.
        """
        size = end = self._folder.size(self._name)
        if size < self._position:  # another file has its name now
            self._position, self._rest = 0, b""
        if most is not None:
            size = min(size, self._position + max(most, _LONGEST))
        self.has_more = size < end
        while self._position < size:
            data = self._folder.read(self._name, self._position, min(_CHUNK, size - self._position))
            if not data:
                return
            self._position += len(data)
            self.bytes_read += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > _LONGEST:
                self._rest = b""
            for line in lines:
                yield line.decode(errors="replace")
