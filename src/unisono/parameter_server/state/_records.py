"""A log of changes in memory that is mapped from a file: it survives the process, not the machine.

A change is copied into the mapping, then its header, and only then is it answered. A process that is killed
leaves the mapping to the system, so that nothing has to be flushed. After a crash of the whole machine the
pages may be there in part: a log of another boot is not read.

A record has checksums of its header, of its meta and of its arrays. The header's checksum begins with the
file's: records that an earlier use of the file has left, of another boot maybe, do not belong to it.

Tests: tests/unit/parameter_server/test_durable.py.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import os
import struct
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from unisono._system._json import MALFORMED, parse_json
from unisono._types import Json
from unisono.parameter_server.state._checksums import checksum
from unisono.parameter_server.state._push import Array
from unisono.rpc._frames import ALIGNMENT, aligned, dtype_name

#: Where the first record begins.
FIRST = 4096

#: Kept: `json.dumps` with options makes one for each change.
_ENCODER = json.JSONEncoder(separators=(",", ":"))

#: The digit is that of the format.
_MAGIC = b"UNPSLOG4"
_RECORD = b"UNPSREC4"
#: Magic, boot, number of the first record, checksum.
_FILE_HEADER = struct.Struct("<8s36sQI")
#: Magic, number, size of the record, begin and length of its meta, checksums of arrays, meta and header.
_HEADER = struct.Struct("<8sQQQQQII")
#: Number, kind, meta and arrays of a change.
Record: TypeAlias = tuple[int, str, dict[str, Json], list[Array]]


@functools.cache
def boot_id() -> str:
    """Return what identifies this boot of the machine; files of another one may be torn."""
    path = Path("/proc/sys/kernel/random/boot_id")
    if path.exists():
        return path.read_text(encoding="ascii").strip()
    # Other systems than Linux do not say it: no other process takes these files.
    return str(uuid.uuid4())


def map_file(path: Path, size: int) -> Array:
    """Return a file as an array of bytes that all processes share; a shorter one is made longer.

    Raises:
        OSError: the disk is full. A mapping without space behind it would kill the process later.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = max(size, os.fstat(descriptor).st_size, 1)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:  # macOS
            os.ftruncate(descriptor, size)
        return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
    finally:
        os.close(descriptor)


class RecordFile:
    """The file of a log; `begin` comes first.

    Args:
        path: of the file, which is created or written over.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes: Array = np.empty(0, np.uint8)
        self._number = 0
        self._begin = self._end = FIRST
        #: The checksum of the file's header.
        self._file = 0
        self._staged: list[dict[str, Json]] = []

    def begin(self, size: int, first: int) -> None:
        """Drop all records."""
        # The mapping is kept: 16 MB of pages would be entered again, at 1 ms.
        if size > len(self._bytes):
            self._bytes = map_file(self._path, size)
        self._number = first
        self._begin = self._end = FIRST
        self._staged = []
        header = _FILE_HEADER.pack(_MAGIC, boot_id().encode(), first, 0)[:-4]
        self._file = zlib.crc32(header)
        self._put(0, header + struct.pack("<I", self._file))

    @property
    def last(self) -> int:
        """The number of the last record; one less than the first where there is none."""
        return self._number - 1

    def has_room(self, nbytes: int) -> bool:
        """Return whether a record fits without a longer file."""
        # Alignment and meta: what is more makes the file longer.
        return self._begin + nbytes + (1 << 18) <= len(self._bytes)

    def stage(self, arrays: Sequence[Array]) -> list[Array]:
        """Copy the next arrays of a record to their place, and return them there."""
        if not self._staged and self._end == self._begin:
            self._end = self._begin + ALIGNMENT
        places = []
        for array in arrays:
            self._grow(self._end + array.nbytes)
            place = self._bytes[self._end : self._end + array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(place, array)
            places.append(place)
            self._staged.append(
                {"at": self._end - self._begin, "dtype": dtype_name(array.dtype), "shape": array.shape}
            )
            self._end = aligned(self._end + array.nbytes)
        return places

    def abort(self) -> None:
        """Forget the arrays of a record that was begun."""
        self._end = self._begin
        self._staged = []

    def commit(self, kind: str, meta: dict[str, Json]) -> int:
        """Complete the record and return its number."""
        self.stage([])
        body = _ENCODER.encode([kind, meta, self._staged]).encode()
        self._grow(self._end + len(body))
        arrays = checksum(self._bytes[self._begin + ALIGNMENT : self._end])
        self._put(self._end, body)
        end = aligned(self._end + len(body))
        fields = (
            _RECORD, self._number, end - self._begin, self._end - self._begin, len(body), arrays,
            zlib.crc32(body),
        )  # fmt: skip
        header = _HEADER.pack(*fields, 0)[:-4]
        # Last of all: a record whose header is not complete does not exist.
        self._put(self._begin, header + struct.pack("<I", zlib.crc32(header, self._file)))
        self._number += 1
        self._begin = self._end = end
        self._staged = []
        return self.last

    def _put(self, at: int, data: bytes) -> None:
        self._bytes[at : at + len(data)] = np.frombuffer(data, np.uint8)

    def _grow(self, end: int) -> None:
        if end > len(self._bytes):
            # The earlier mapping stays as long as arrays lie in it; both show the same pages.
            self._bytes = map_file(self._path, aligned(end + end // 2))


def read_records(path: Path) -> tuple[list[Record], str]:
    """Return the records of a file up to the first that is not complete, and what is known of that one.

    Args:
        path: of the file; one that is absent, damaged or of another boot has no records.
    """
    if not path.exists() or path.stat().st_size < FIRST:
        return [], f"{path} is missing or too short"
    content = np.memmap(path, np.uint8, mode="r")
    raw = content[: _FILE_HEADER.size].tobytes()
    magic, boot, first, found = _FILE_HEADER.unpack(raw)
    if magic != _MAGIC:
        return [], f"{path} is not of this version's format: it begins with {magic!r}"
    if found != zlib.crc32(raw[:-4]):
        return [], f"the header of {path} does not have its checksum"
    if boot.decode("ascii", "replace") != boot_id():
        return [], f"{path} was written before this machine was started again"
    records: list[Record] = []
    begin = FIRST
    while not isinstance(record := _read_record(content, begin, first + len(records), found), str):
        size, *rest = record
        records.append((first + len(records), *rest))
        begin += size
    return records, f"in {path}, record {first + len(records)} {record}"


def _read_record(
    content: Array, begin: int, number: int, file: int
) -> tuple[int, str, dict[str, Json], list[Array]] | str:
    """Return the size of a record and what is in it, or what is wrong with it."""
    raw = content[begin : begin + _HEADER.size].tobytes()
    if len(raw) < _HEADER.size:
        return "is behind the end of the file"
    magic, found, size, meta_at, meta_length, arrays_checksum, meta_checksum, own = _HEADER.unpack(raw)
    if magic != _RECORD or found != number or own != zlib.crc32(raw[:-4], file):
        return "has no complete header"
    if begin + meta_at + meta_length > len(content):
        return "ends behind the end of the file"
    body = content[begin + meta_at : begin + meta_at + meta_length].tobytes()
    if zlib.crc32(body) != meta_checksum:
        return "has a description without its checksum"
    if checksum(content[begin + ALIGNMENT : begin + meta_at]) != arrays_checksum:
        return "has arrays without their checksum"
    try:
        kind, meta, staged = parse_json(body)
        if not isinstance(kind, str) or not isinstance(meta, dict):
            raise TypeError("its kind is no text, or its meta no object")
        arrays = [_array_at(content, begin + s["at"], s["dtype"], s["shape"]) for s in staged]
    except MALFORMED as error:
        return f"has a description of another form ({type(error).__name__}: {error})"
    return size, kind, meta, arrays


def _array_at(content: Array, at: int, dtype: str, shape: Sequence[int]) -> Array:
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    return content[at : at + nbytes].view(dtype).reshape(shape)
