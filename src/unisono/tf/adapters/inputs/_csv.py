"""Rows of CSV files as data sets, read by Python's `csv`.

Tests: tests/unit/tf/test_csv.py.
"""

from __future__ import annotations

import csv
import functools
import glob
import gzip
import io
import itertools
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

import numpy as np

from unisono._errors import InvalidArgumentError
from unisono.data._pipeline._structure import TensorSpec
from unisono.preprocessing._fingerprints import on_host
from unisono.tf.adapters._elements import TensorDataset
from unisono.tf.adapters.inputs._host_tensor import HostTensor

#: Text is bytes for TensorFlow, of whatever encoding.
_ANY = "surrogateescape"

#: What TensorFlow tries for a column without a default, in this order.
_KINDS = (np.int32, np.int64, np.float32, np.float64)


def CsvDataset(  # noqa: N802 (TensorFlow's name)
    filenames: Any,
    record_defaults: Sequence[Any],
    compression_type: str | None = None,
    buffer_size: int | None = None,
    header: bool = False,
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    select_cols: Sequence[int] | None = None,
    exclude_cols: Sequence[int] | None = None,
) -> TensorDataset:
    """Return a data set of the rows of CSV files: tuples of numbers, and bytes for text.

    Args:
        filenames: a name, or several.
        record_defaults: of each column the value where a field is empty, or a dtype where none may be.
        compression_type: "GZIP", "ZLIB", or None.
        buffer_size: is not used.
        header: whether the first row of each file is one of names.
        na_value: what stands for an empty field, too.
        select_cols: the numbers of the columns to read; None for all.
        exclude_cols: the numbers of those not to read.
    """
    # A name may be an element of a data set.
    files = [filenames] if np.ndim(filenames) == 0 else list(filenames)
    columns = [_column(default) for default in record_defaults]

    def elements() -> Iterator[tuple[Any, ...]]:
        names = [os.fsdecode(f) for f in files]
        for number, row in enumerate(_rows(names, compression_type, field_delim, use_quote_delim, header)):
            yield _values(
                _chosen(row, select_cols, exclude_cols), columns, na_value, f"row {number} of {files}"
            )

    return TensorDataset.from_generator(
        elements, output_signature=tuple(TensorSpec((), d) for d, _ in columns)
    )


def decode_csv(
    records: Any,
    record_defaults: Sequence[Any],
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    select_cols: Sequence[int] | None = None,
) -> list[HostTensor]:
    """Return the columns of lines of CSV, each an array of the lines' shape.

    Args:
        records: a line, or an array of them.
        record_defaults: as for `CsvDataset`.
        na_value: what stands for an empty field, too.
        select_cols: the numbers of the columns to read; None for all.

    Raises:
        InvalidArgumentError: a line has another number of fields, or one that is not of its column's dtype.

    >>> [c.tolist() for c in decode_csv(["1,a", ",b"], [0, ""])]
    [[1, 0], [b'a', b'b']]
    """
    lines = on_host(records, "tf.io.decode_csv")
    columns = [_column(default) for default in record_defaults]
    rows = []
    for number, line in enumerate(lines.ravel().tolist()):
        split = list(_reader([line.decode(errors=_ANY)], field_delim, use_quote_delim))
        if len(split) != 1:
            raise InvalidArgumentError(
                f"Each record must be one line. Received: {len(split)} lines in {line[:40]!r}."
            )
        rows.append(_values(_chosen(split[0], select_cols, None), columns, na_value, f"line {number}"))
    return [
        np.array([row[i] for row in rows], dtype).reshape(lines.shape).view(HostTensor)
        for i, (dtype, _) in enumerate(columns)
    ]


def make_csv_dataset(
    file_pattern: Any,
    batch_size: int,
    column_names: Sequence[str] | None = None,
    column_defaults: Sequence[Any] | None = None,
    label_name: str | None = None,
    select_columns: Sequence[Any] | None = None,
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    header: bool = True,
    num_epochs: int | None = None,
    shuffle: bool = True,
    shuffle_buffer_size: int = 10000,
    shuffle_seed: int | None = None,
    num_rows_for_inference: int | None = 100,
    compression_type: str | None = None,
    **kwargs: object,
) -> TensorDataset:
    """Return a data set of batches of CSV files' rows: dicts of columns, with the labels beside them.

    Args:
        file_pattern: the names of files, or patterns of them.
        column_names: those of the columns; None for the first row's.
        column_defaults: as `record_defaults` of `CsvDataset`; None for what the first rows say.
        label_name: the column of the labels; None for none.
        select_columns: the names, or numbers, of the columns to read; None for all.
        na_value: what stands for an empty field, too.
        header: whether the first row of each file is one of names.
        num_epochs: how often the rows are read; None for without end.
        shuffle_seed: for the same order at each start.
        num_rows_for_inference: how many rows say what the columns hold; None for all.
        compression_type: as for `CsvDataset`.
        **kwargs: of reading ahead and in parallel, which are not used.

    Raises:
        InvalidArgumentError: there is no such file, or column.
    """
    files = _files(file_pattern)
    read = functools.partial(_rows, files, compression_type, field_delim, use_quote_delim)
    names = list(column_names) if column_names is not None else next(read(header=False), [])
    places: list[int] = [names.index(c) if isinstance(c, str) else int(c) for c in select_columns or names]
    if label_name is not None and label_name not in names:
        raise InvalidArgumentError(f"`label_name` must be a column. Received: {label_name!r}, of {names}.")
    if column_defaults is None:
        first_rows = itertools.islice(read(header=header), num_rows_for_inference)
        column_defaults = _inferred(first_rows, places, na_value)
    rows = CsvDataset(
        files, column_defaults, compression_type, None, header, field_delim, use_quote_delim, na_value, places
    )
    if shuffle:
        rows = rows.shuffle(shuffle_buffer_size, shuffle_seed)
    batches = rows.repeat(num_epochs).batch(batch_size, drop_remainder=num_epochs is None)
    chosen = [names[place] for place in places]

    def by_name(*values: Any) -> Any:
        features = dict(zip(chosen, values, strict=True))
        return features if label_name is None else (features, features.pop(label_name))

    return batches.map(by_name)


def _files(pattern: Any) -> list[str]:
    patterns = [pattern] if isinstance(pattern, (str, os.PathLike)) else list(pattern)
    files = [f for p in patterns for f in sorted(glob.glob(os.fspath(p)))]
    if not files:
        raise InvalidArgumentError(f"`file_pattern` must match a file. Received: {pattern!r}.")
    return files


def _open(file: str, compression: str | None) -> TextIO:
    if compression == "GZIP":
        return gzip.open(file, "rt", newline="", encoding="utf-8", errors=_ANY)
    if compression == "ZLIB":
        with open(file, "rb") as packed:
            content = packed.read()
        try:
            return io.StringIO(zlib.decompress(content).decode(errors=_ANY))
        except zlib.error as error:
            raise InvalidArgumentError(
                f"A file must be compressed by zlib. Received: {file} ({error})."
            ) from None
    if compression:
        raise InvalidArgumentError(
            f"`compression_type` must be 'GZIP', 'ZLIB' or None. Received: {compression!r}."
        )
    return open(file, newline="", encoding="utf-8", errors=_ANY)


def _reader(lines: Iterable[str], delimiter: str, quotes: bool) -> Iterator[list[str]]:
    rows = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE)
    try:
        yield from rows
    # A packed file that is cut or changed, too.
    except (csv.Error, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InvalidArgumentError(
            f"Rows of CSV must be readable. Received: {error} in line {rows.line_num + 1}."
        ) from None


def _rows(
    files: list[str], compression: str | None, delimiter: str, quotes: bool, header: bool
) -> Iterator[list[str]]:
    for file in files:
        with _open(file, compression) as lines:
            reader = _reader(lines, delimiter, quotes)
            if header:
                next(reader, None)
            yield from (row for row in reader if row)


def _chosen(row: list[str], select: Sequence[int] | None, exclude: Sequence[int] | None) -> list[str]:
    if select is not None:
        return [row[i] for i in select]
    return [text for i, text in enumerate(row) if not exclude or i not in exclude]


def _column(default: Any) -> tuple[Any, Any]:
    """Return a column's dtype, and the value of an empty field; None where there must be one."""
    if isinstance(default, np.dtype) or (isinstance(default, type) and issubclass(default, np.generic)):
        return np.dtype(default), None
    if isinstance(default, str) and default == "string":
        return np.dtype(object), None
    value = default[0] if isinstance(default, (list, tuple)) and default else default
    if isinstance(value, (str, bytes)) or (isinstance(value, (list, tuple)) and not value):
        return np.dtype(object), value.encode() if isinstance(value, str) else value or b""
    array = np.asarray(value)
    kind = array.dtype if hasattr(value, "dtype") else np.dtype(_OF_PYTHON[array.dtype.kind])
    return kind, array.reshape(()).astype(kind)


_OF_PYTHON = {"f": "float32", "i": "int32", "b": "bool"}


def _values(
    fields: list[str], columns: Sequence[tuple[np.dtype, Any]], na_value: str, where: str
) -> tuple[Any, ...]:
    if len(fields) != len(columns):
        raise InvalidArgumentError(
            f"Each row must have {len(columns)} fields, one for each of `record_defaults`. Received: "
            f"{len(fields)} in {where}."
        )
    found = []
    for number, (text, (dtype, default)) in enumerate(zip(fields, columns, strict=True)):
        if text in ("", na_value):
            if default is None:
                raise InvalidArgumentError(
                    f"A field without a default must have a value. Received: {text!r} in column {number} of "
                    f"{where}. Write a value in place of the dtype in `record_defaults`."
                )
            found.append(default)
        elif dtype == np.dtype(object):
            found.append(text.encode(errors=_ANY))
        else:
            try:
                found.append(np.asarray(text.strip()).astype(dtype))
            except (ValueError, OverflowError):
                raise InvalidArgumentError(
                    f"A field of column {number} must be {dtype}. Received: {text!r} in {where}."
                ) from None
    return tuple(found)


def _inferred(rows: Iterable[list[str]], places: list[int], na_value: str) -> list[Any]:
    """Return what the columns of rows hold, by a value for empty fields."""
    kinds = [0] * len(places)
    for row in rows:
        for i, place in enumerate(places):
            while kinds[i] < len(_KINDS) and row[place] not in ("", na_value):
                if _fits(row[place], _KINDS[kinds[i]]):
                    break
                kinds[i] += 1
    return [_KINDS[k](0) if k < len(_KINDS) else "" for k in kinds]


def _fits(text: str, kind: type) -> bool:
    try:
        if issubclass(kind, np.integer):
            return bool(np.iinfo(kind).min <= int(text) <= np.iinfo(kind).max)
        value = float(text)
    except ValueError:
        return False
    # A number that is too large for 32 bits needs 64.
    return kind is np.float64 or bool(np.isfinite(np.float32(value)) or not np.isfinite(value))
