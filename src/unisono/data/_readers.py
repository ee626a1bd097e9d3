"""Data sets of the records of files.

Tests: tests/unit/data/test_dataset_sources.py.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grain

from unisono.data._dataset import Dataset
from unisono.data._pipeline import _structure
from unisono.data._pipeline._cardinality import UNKNOWN
from unisono.data._pipeline._indexed import Slices, Source
from unisono.data._pipeline._interleave import Interleave
from unisono.data._pipeline._plan import Node, Pass
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
    """
    return _records(filenames, TFRecords, num_parallel_reads)


def ArrayRecordDataset(filenames: str | os.PathLike[str] | list[str]) -> Dataset:  # noqa: N802
    """Return a data set of the records of ArrayRecord files, as bytes; they can be shuffled without reading.

    Args:
        filenames: A name or several.

    Returns:
        A data set.
    """
    paths = filenames if isinstance(filenames, list) else [os.fspath(filenames)]
    return Dataset(Source(lambda: grain.sources.ArrayRecordDataSource(paths)))


_TEXT = TensorSpec((), object)


@dataclasses.dataclass(frozen=True, eq=False)
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
        return iter(grain.experimental.TFRecordIterDataset(self.name))


def _records(filenames: Filenames, read: Callable[[str], Node], parallel: int | None) -> Dataset:
    if not isinstance(filenames, Dataset):
        names = [filenames] if isinstance(filenames, (str, bytes, os.PathLike)) else list(filenames)
        # Names are bytes in elements, like all strings in tf.data.
        encoded = [os.fsencode(name) for name in names]
        filenames = Dataset(Slices(_structure.as_element(encoded), files=True))
    cycle = parallel if parallel and parallel > 0 else 1
    names_of_files: Dataset = filenames
    node = node_of(filenames, "a reader of files")
    return names_of_files.derived(
        Interleave(
            node, lambda name: read(os.fsdecode(name)), cycle, block_length=1, ahead=1 if cycle > 1 else 0
        )
    )


def _lines(name: str) -> Iterator[bytes]:
    with open(name, "rb") as file:
        for line in file:
            # The file is read as bytes, in which the line ends of Windows are not translated.
            yield line.rstrip(b"\r\n")
