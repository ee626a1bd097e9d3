"""Data sets of the records of files.

Tests: tests/unit/data/test_dataset_sources.py.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import grain
import numpy as np
import numpy.typing as npt

from unisono._errors import InvalidArgumentError
from unisono._system._json import MALFORMED
from unisono.data._dataset import Dataset
from unisono.data._pipeline import _structure
from unisono.data._pipeline._cardinality import UNKNOWN
from unisono.data._pipeline._indexed import Slices, Source
from unisono.data._pipeline._interleave import Interleave
from unisono.data._pipeline._plan import Node, Pass, StateIterator
from unisono.data._pipeline._streams import Generator
from unisono.data._pipeline._structure import Element, TensorSpec
from unisono.data._transforms import node_of

#: A name, several, or a data set of names.
Filenames: TypeAlias = Any


def TextLineDataset(filenames: Filenames, num_parallel_reads: int | None = None) -> Dataset:  # noqa: N802
    """Return a data set of the lines of text files, as bytes without the line end.

    Args:
        filenames: A name, several, or a data set of names.
        num_parallel_reads: How many files are read at the same time, their lines in turn; None for one after
            the other.

    Returns:
        A data set.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "lines.txt")
    >>> path.write_bytes(bytes([97, 10, 98, 10]))
    4
    >>> list(TextLineDataset(str(path)).as_numpy_iterator())
    [b'a', b'b']
    """
    return _records(
        filenames, lambda name: Generator(functools.partial(_lines, name), _TEXT), num_parallel_reads
    )


def TFRecordDataset(filenames: Filenames, num_parallel_reads: int | None = None) -> Dataset:  # noqa: N802
    """Return a data set of the records of uncompressed TFRecord files, as bytes; checksums are not verified.

    Args:
        filenames: A name, several, or a data set of names.
        num_parallel_reads: How many files are read at the same time, their records in turn; None for one
            after the other.

    Returns:
        A data set.

    >>> import tempfile
    >>> from unisono import tf
    >>> path = tempfile.mkdtemp() + "/records"
    >>> with tf.io.TFRecordWriter(path) as writer:
    ...     writer.write(b"one")
    >>> list(TFRecordDataset(path).as_numpy_iterator())
    [b'one']
    """
    return _records(filenames, TFRecords, num_parallel_reads)


def ArrayRecordDataset(filenames: str | os.PathLike[str] | list[str]) -> Dataset:  # noqa: N802
    """Return a data set of the records of ArrayRecord files, as bytes; they can be shuffled without reading.

    Args:
        filenames: A name or several.

    Returns:
        A data set.

    >>> import tempfile
    >>> from array_record.python.array_record_module import ArrayRecordWriter
    >>> path = tempfile.mkdtemp() + "/records"
    >>> writer = ArrayRecordWriter(path, "group_size:1")
    >>> writer.write(b"one")
    >>> writer.close()
    >>> list(ArrayRecordDataset(path).as_numpy_iterator())
    [b'one']
    """
    paths = filenames if isinstance(filenames, list) else [os.fspath(filenames)]

    def source() -> grain.sources.ArrayRecordDataSource:
        try:
            return grain.sources.ArrayRecordDataSource(paths)
        except RuntimeError as error:
            raise InvalidArgumentError(
                "An ArrayRecord file must be whole, from its first block to the index at its end. Received: "
                f"{error} in one of {paths}. Write the file anew."
            ) from None

    return Dataset(Source(source))


_TEXT = TensorSpec((), object)


class TFRecords(Node):
    """The records of one TFRecord file, by Grain's reader."""

    name: str

    @property
    def cardinality(self) -> int:
        return UNKNOWN

    @functools.cached_property
    def spec(self) -> Element:
        return _TEXT

    def iterate(self, run: Pass) -> grain.DatasetIterator:
        return _RecordIterator(iter(grain.experimental.TFRecordIterDataset(self.name)), self.name)


class _RecordIterator(StateIterator):
    """Grain's iterator over a file; what is cut or is no such file is an error that names it."""

    def __init__(self, source: grain.DatasetIterator, name: str) -> None:
        super().__init__(source)
        self._source, self._name = source, name

    def __next__(self) -> Element:
        try:
            return next(self._source)
        # Of a length that no memory holds, too.
        except MALFORMED as error:
            raise InvalidArgumentError(
                "A TFRecord file must hold whole records, without compression. Received: "
                f"{self._name!r}, where a record cannot be read ({type(error).__name__}: {error!s:.80}). "
                "Write the file again."
            ) from error

    def get_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._source.get_state()
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        self._source.set_state(state)


#: The length of a record and the checksum of that length; another checksum follows the record.
_HEADER = struct.Struct("<QI")
_CHECKSUM_BYTES = 4


@dataclasses.dataclass(frozen=True)
class FilePart:
    """Some successive records of a TFRecord file."""

    name: str
    skip: int
    take: int


class TFRecordSource(Sequence[bytes]):
    """The records of TFRecord files by position, in the order in which tf.data interleaves the files.

    The format has no index: a file is scanned when the first of its records is read.
    """

    def __init__(self, parts: Sequence[FilePart], cycle_length: int, block_length: int) -> None:
        self._parts = list(parts)
        self._places = interleaved([part.take for part in parts], cycle_length, block_length)
        self._offsets: dict[int, npt.NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, position: Any) -> Any:
        number, row = self._places[position].tolist()
        # Two threads may scan a file at the same time: they find the same.
        if number not in self._offsets:
            self._offsets[number] = _offsets(self._parts[number])
        with open(self._parts[number].name, "rb") as file:
            file.seek(int(self._offsets[number][row]))
            length, _ = _HEADER.unpack(file.read(_HEADER.size))
            return file.read(length)


def interleaved(counts: Sequence[int], cycle_length: int, block_length: int) -> npt.NDArray[np.int64]:
    """Return the order in which `Dataset.interleave` yields the elements of data sets of known sizes.

    >>> interleaved([3, 2], cycle_length=2, block_length=2).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2]]
    """
    blocks = [np.empty((0, 2), np.int64)]
    # For each open data set its number and the next position.
    slots: list[tuple[int, int] | None] = [None] * cycle_length
    opened = 0
    while opened < len(counts) or any(slots):
        for at in range(cycle_length):
            if slots[at] is None and opened < len(counts):
                slots[at] = (opened, 0)
                opened += 1
            slot = slots[at]
            if slot is not None:
                number, start = slot
                rows = np.arange(start, min(start + block_length, counts[number]))
                blocks.append(np.stack([np.full_like(rows, number), rows], axis=1))
                # One that ends gives up the rest of its block, and the next is opened at the next turn.
                slots[at] = (number, start + block_length) if len(rows) == block_length else None
    return np.concatenate(blocks)


def _offsets(part: FilePart) -> npt.NDArray[np.int64]:
    offsets: list[int] = []
    with open(part.name, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while len(offsets) < part.skip + part.take:
            offset = file.tell()
            header = file.read(_HEADER.size)
            length = _HEADER.unpack(header)[0] if len(header) == _HEADER.size else size
            if offset + _HEADER.size + length + _CHECKSUM_BYTES > size:
                raise InvalidArgumentError(
                    "A TFRecord file must hold the records that the description of its data set counts. "
                    f"Received: {part.name!r} with {len(offsets)} of at least {part.skip + part.take}. "
                    "Write the file again."
                )
            offsets.append(offset)
            file.seek(length + _CHECKSUM_BYTES, os.SEEK_CUR)
    return np.array(offsets[part.skip :], np.int64)


def _records(filenames: Filenames, read: Callable[[str], Node], parallel: int | None) -> Dataset:
    if not isinstance(filenames, Dataset):
        names = [filenames] if np.ndim(filenames) == 0 else list(filenames)
        # Names are bytes in elements, like all strings in tf.data.
        encoded = [os.fsencode(name) for name in names]
        filenames = Dataset(Slices(_structure.as_element(encoded), files=True))
    cycle = parallel if parallel and parallel > 0 else 1
    names_of_files: Dataset = filenames
    node = node_of(filenames, "a reader of files")
    return names_of_files._derived(
        Interleave(
            node, lambda name: read(os.fsdecode(name)), cycle, block_length=1, ahead=1 if cycle > 1 else 0
        )
    )


def _lines(name: str) -> Iterator[bytes]:
    with open(name, "rb") as file:
        for line in file:
            # The file is read as bytes, in which the line ends of Windows are not translated.
            yield line.rstrip(b"\r\n")
