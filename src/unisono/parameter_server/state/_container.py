"""One file with something that JSON can hold and arrays: images, which the log begins at, and snapshots.

An image is written over an earlier one through a mapping. It survives the process, and is read after a
restart on the same boot alone. A snapshot is a new file, flushed to the disk and then renamed:
it survives the machine.
Both have a checksum for each array.

Tests: tests/unit/parameter_server/test_durable.py.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from unisono._errors import CheckpointError
from unisono._system._files import rename_durably
from unisono._system._json import MALFORMED, parse_json
from unisono._types import Json
from unisono.parameter_server.state._checksums import PIECE, checksum
from unisono.parameter_server.state._push import Array
from unisono.parameter_server.state._records import FIRST, boot_id, map_file
from unisono.rpc._frames import aligned

#: The digit is that of the format.
_MAGIC = b"UNPSARR3"
#: Magic, boot, number of the last change, begin and length of the meta, its checksum, and the header's.
_HEADER = struct.Struct("<8s36sQQQII")


@dataclasses.dataclass(frozen=True, eq=False)
class Container:
    """What a file holds.

    Args:
        arrays: the arrays; they lie in the file.
    """

    number: int
    boot: str
    meta: dict[str, Json]
    arrays: list[Array]


class ImageFile:
    """A file that is written over again and again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes: Array | None = None

    def write(self, number: int, meta: dict[str, Json], arrays: Sequence[Array]) -> None:
        """Replace the content; until it is complete the file holds nothing."""
        places, at = [], FIRST
        for array in arrays:
            places.append(_entry(array, at))
            at = aligned(at + array.nbytes)
        if self._bytes is None or len(self._bytes) < at:
            self._bytes = map_file(self.path, at)
        self._bytes[: _HEADER.size] = 0
        for array, place in zip(arrays, places, strict=True):
            begin = place["at"]
            own = self._bytes[begin : begin + array.nbytes]
            np.copyto(own.view(array.dtype).reshape(array.shape), array)
            place["checksum"] = checksum(own)
        body = json.dumps({"meta": meta, "arrays": places}, separators=(",", ":")).encode()
        if len(self._bytes) < at + len(body):
            self._bytes = map_file(self.path, at + len(body))
        self._bytes[at : at + len(body)] = np.frombuffer(body, np.uint8)
        self._bytes[: _HEADER.size] = np.frombuffer(_header(number, at, body), np.uint8)


class SnapshotWriter:
    """A snapshot that is being written; without `finish` nothing remains of it.

    Args:
        path: of the file; must be new.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._aside = path.with_name(f".{path.name}.partial")
        self._file: BinaryIO | None = None
        self._places: list[dict[str, Json]] = []

    def __enter__(self) -> SnapshotWriter:
        self._file = self._aside.open("wb")
        self._file.seek(FIRST)
        return self

    def __exit__(self, *error: object) -> None:
        try:
            # Writes what is left in its buffer, which a full disk refuses.
            self._opened.close()
        finally:
            self._aside.unlink(missing_ok=True)

    @property
    def _opened(self) -> BinaryIO:
        if self._file is None:
            raise ValueError("A snapshot must be entered before it is written.")
        return self._file

    def add(self, array: Array) -> None:
        """Append an array.

        Args:
            array: may change meanwhile: what the file holds of it fits the checksum in any case.
        """
        begin, found = self._opened.tell(), 0
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for at in range(0, flat.nbytes, PIECE):
            piece = flat[at : at + PIECE].tobytes()
            found = checksum(piece, found)
            self._opened.write(piece)
        self._places.append(_entry(array, begin) | {"checksum": found})
        self._opened.seek(aligned(self._opened.tell()))

    def finish(self, number: int, meta: dict[str, Json]) -> None:
        """Complete the file and give it its name."""
        file, at = self._opened, self._opened.tell()
        body = json.dumps({"meta": meta, "arrays": self._places}, separators=(",", ":")).encode()
        file.write(body)
        file.seek(0)
        file.write(_header(number, at, body))
        file.flush()
        rename_durably(self._aside, self._path)


def read_container(path: Path) -> Container:
    """Read an image or a snapshot; arrays are compared with their checksums.

    Raises:
        CheckpointError: the file is not complete, or damaged.
    """
    if path.stat().st_size < FIRST:
        raise _damaged(path, "it is too short")
    content = np.memmap(path, np.uint8, mode="r")
    raw = content[: _HEADER.size].tobytes()
    magic, boot, number, at, length, body_checksum, own = _HEADER.unpack(raw)
    if magic[:7] == _MAGIC[:7] and magic != _MAGIC:
        raise _damaged(path, f"it has the format {magic[7:].decode()} of another version of Unisono")
    if magic != _MAGIC or zlib.crc32(raw[:-4]) != own:
        raise _damaged(path, "its header is not complete")
    body = content[at : at + length].tobytes()
    if zlib.crc32(body) != body_checksum:
        raise _damaged(path, "its description is not complete")
    try:
        described = parse_json(body)
        meta, arrays = described["meta"], list(_arrays(path, content, described["arrays"]))
        if not isinstance(meta, dict):
            raise TypeError("the description is no object")
    except CheckpointError:
        raise
    except MALFORMED as error:
        raise _damaged(
            path, f"its description is of another form ({type(error).__name__}: {error})"
        ) from error
    return Container(int(number), boot.decode("ascii", "replace"), meta, arrays)


def _arrays(path: Path, content: Array, places: Sequence[Json]) -> Iterator[Array]:
    for i, place in enumerate(places):
        raw = content[place["at"] : place["at"] + place["nbytes"]]
        if checksum(raw) != place["checksum"]:
            raise _damaged(path, f"array {i} does not have its checksum")
        yield raw.view(place["dtype"]).reshape(place["shape"])


def _entry(array: Array, at: int) -> dict[str, Json]:
    return {"at": at, "nbytes": array.nbytes, "dtype": array.dtype.name, "shape": array.shape}


def _header(number: int, at: int, body: bytes) -> bytes:
    fields = _HEADER.pack(_MAGIC, boot_id().encode(), number, at, len(body), zlib.crc32(body), 0)[:-4]
    return fields + struct.pack("<I", zlib.crc32(fields))


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"A server's image or snapshot must be complete. Received: {path}, but {why}.")
