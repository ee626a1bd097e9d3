"""Records of TFRecord files: `tf.train.Example` and what `tf.io` parses.

Tests: tests/unit/tf/test_records.py.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono._errors import InvalidArgumentError, MissingPackageError

#: The fields of each message of TensorFlow's `example.proto` and `feature.proto`: number, type, repeated.
#: Types are the numbers of `FieldDescriptorProto`: 12 bytes, 2 float, 3 int64, else the name of a message.
_MESSAGES: dict[str, dict[str, tuple[int, int | str, bool]]] = {
    "BytesList": {"value": (1, 12, True)},
    "FloatList": {"value": (1, 2, True)},
    "Int64List": {"value": (1, 3, True)},
    "Feature": {
        "bytes_list": (1, "BytesList", False),
        "float_list": (2, "FloatList", False),
        "int64_list": (3, "Int64List", False),
    },
    "FeatureList": {"feature": (1, "Feature", True)},
    "Features": {"feature": (1, "FeatureEntry", True)},
    "FeatureLists": {"feature_list": (1, "FeatureListEntry", True)},
    "Example": {"features": (1, "Features", False)},
    "SequenceExample": {
        "context": (1, "Features", False),
        "feature_lists": (2, "FeatureLists", False),
    },
}

#: Messages whose repeated field is a map from strings.
_MAPS = {"Features": ("FeatureEntry", "Feature"), "FeatureLists": ("FeatureListEntry", "FeatureList")}


@functools.cache
def _messages() -> Mapping[str, Any]:
    """Return the classes of the messages, by name."""
    try:
        from google.protobuf import (  # type: ignore[import-untyped]
            descriptor_pb2,
            descriptor_pool,
            message_factory,
        )
    except ModuleNotFoundError:
        raise MissingPackageError(
            "`tf.train.Example` is a protocol buffer. Write `pip install protobuf`."
        ) from None
    file: Any = descriptor_pb2.FileDescriptorProto(
        name="unisono/example.proto", package="tensorflow", syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, is_repeated) in fields.items():
            scope = f"tensorflow.{name}." if name in _MAPS else "tensorflow."
            _add_field(message, field, number, kind, is_repeated, scope)
        if name in _MAPS:
            entry, value = _MAPS[name]
            nested = message.nested_type.add(name=entry)
            nested.options.map_entry = True
            _add_field(nested, "key", 1, 9, False, "")
            _add_field(nested, "value", 2, value, False, "tensorflow.")
        if name == "Feature":
            message.oneof_decl.add(name="kind")
            for field in message.field:
                field.oneof_index = 0
    # A pool of its own: TensorFlow has messages of these names in the common one.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return types.MappingProxyType(
        {
            name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tensorflow.{name}"))
            for name in _MESSAGES
        }
    )


def _add_field(message: Any, name: str, number: int, kind: int | str, is_repeated: bool, scope: str) -> None:
    own = {"type": kind} if isinstance(kind, int) else {"type": 11, "type_name": f".{scope}{kind}"}
    message.field.add(name=name, number=number, label=3 if is_repeated else 1, **own)


def __getattr__(name: str) -> Any:
    # The classes are made when a program first names one.
    if name in ("Int64List", "BytesList"):
        return _int64_list if name == "Int64List" else _bytes_list
    if name in _MESSAGES:
        return _messages()[name]
    raise AttributeError(name)


def _int64_list(value: Iterable[Any] = ()) -> Any:
    # Protocol buffers take no booleans for integers any more, of whatever kind.
    numbers = [int(v) if isinstance(v, bool) or getattr(v, "dtype", None) == np.bool_ else v for v in value]
    return _messages()["Int64List"](value=numbers)


def _bytes_list(value: Iterable[Any] = ()) -> Any:
    # Strings of a data set's element are arrays.
    return _messages()["BytesList"](value=[v.item() if isinstance(v, np.ndarray) else v for v in value])


class TFRecordWriter:
    """Writes records into an uncompressed TFRecord file.

    Args:
        path: of the file.
        options: None.

    Raises:
        InvalidArgumentError: `options` asks for compression.
        MissingPackageError: TensorBoard is not installed, which has the writer.
    """

    def __init__(self, path: str | os.PathLike[str], options: Any = None) -> None:
        if options not in (None, ""):
            raise InvalidArgumentError(
                f"Records are written without compression. Received: options={options!r}. Write None."
            )
        # TensorBoard is imported when it is needed.
        from unisono._summary._event_files import writer_of_records

        self._file = open(path, "wb")  # noqa: SIM115 (`close` closes it)
        self._writer = writer_of_records(self._file)

    def write(self, record: bytes) -> None:
        """Append a record."""
        self._writer.write(bytes(record))

    def flush(self) -> None:
        """Write what is buffered into the file."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> TFRecordWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class FixedLenFeature:
    """A feature of a fixed shape.

    Args:
        shape: of the array.
        dtype: `tf.float32`, `tf.int64` or `tf.string`.
        default_value: where a record lacks it; None for an error.
    """

    shape: Sequence[int]
    dtype: npt.DTypeLike
    default_value: Any = None


@dataclasses.dataclass(frozen=True)
class FixedLenSequenceFeature:
    """A feature of any number of rows of a fixed shape.

    Args:
        shape: of a row.
        dtype: `tf.float32`, `tf.int64` or `tf.string`.
        allow_missing: must be True.
        default_value: None, as rows are not padded here.
    """

    shape: Sequence[int]
    dtype: npt.DTypeLike
    allow_missing: bool = False
    default_value: Any = None


def parse_single_example(serialized: Any, features: Mapping[str, Any]) -> Any:
    """Return the features of a record, as NumPy arrays by name; in `Dataset.map`.

    Args:
        serialized: a serialized `tf.train.Example`.
        features: `FixedLenFeature` or `FixedLenSequenceFeature` by name.

    Raises:
        InvalidArgumentError: the record does not hold what `features` says.
    """
    kinds = _messages()
    # Installed with those.
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    record = _bytes_of(serialized)
    try:
        example = kinds["Example"].FromString(record)
    except DecodeError as error:
        raise InvalidArgumentError(
            f"A record must be a serialized `tf.train.Example`. Received: {record[:40]!r} of {len(record)} "
            f"bytes ({error}). Write what `SerializeToString` returns."
        ) from None
    return {key: _parsed(key, feature, example.features.feature) for key, feature in features.items()}


def parse_example(serialized: Any, features: Mapping[str, Any]) -> Any:
    """Return the features of a batch of records, as NumPy arrays by name; in `Dataset.map`.

    Args:
        serialized: an array of serialized `tf.train.Example`s.
        features: `FixedLenFeature` by name.

    Raises:
        InvalidArgumentError: the records do not hold what `features` says.
    """
    rows = [parse_single_example(row, features) for row in np.asarray(serialized, object).reshape(-1)]
    for key, feature in features.items():
        if isinstance(feature, FixedLenSequenceFeature):
            raise InvalidArgumentError(
                "Records of several lengths are parsed one by one. Write: `Dataset.map` with "
                f"`tf.io.parse_single_example`, then `padded_batch`. Received: {key!r}: {feature}."
            )
    return {key: np.stack([row[key] for row in rows]) for key in features}


def decode_raw(input_bytes: Any, out_type: npt.DTypeLike, little_endian: bool = True) -> np.ndarray:
    """Return bytes as numbers, in `Dataset.map`.

    >>> decode_raw(bytes([1, 0, 2, 0]), "uint16").tolist()
    [1, 2]
    """
    dtype = np.dtype(out_type).newbyteorder("<" if little_endian else ">")
    return np.frombuffer(_bytes_of(input_bytes), dtype).astype(out_type)


def _bytes_of(value: Any) -> bytes:
    found = value.item() if isinstance(value, (np.ndarray, np.generic)) else value
    if not isinstance(found, (bytes, bytearray)):
        raise InvalidArgumentError(f"A record is bytes, of one element of a dataset. Received: {value!r}.")
    return bytes(found)


def _parsed(key: str, feature: Any, held: Mapping[str, Any]) -> Any:
    if not isinstance(feature, (FixedLenFeature, FixedLenSequenceFeature)):
        raise InvalidArgumentError(
            f"A feature is a `tf.io.FixedLenFeature` or a `FixedLenSequenceFeature`. Received: {key!r}: "
            f"{feature!r}."
        )
    is_text = feature.dtype in ("string", str, bytes, object)
    # The dictionary of a message makes what it lacks.
    kind = held[key].WhichOneof("kind") if key in held else None
    if kind is None:
        return _default(key, feature, is_text)
    values = list(getattr(held[key], kind).value)
    if (
        (kind == "bytes_list") != is_text
        or (kind == "int64_list" and not is_text and np.dtype(feature.dtype).kind not in "iu")
        or (kind == "float_list" and np.dtype(feature.dtype).kind != "f")
    ):
        raise InvalidArgumentError(
            f"A feature has the dtype that the record holds. Received: {key!r}: {feature}, a {kind}."
        )
    shape = [*feature.shape] if isinstance(feature, FixedLenFeature) else [-1, *feature.shape]
    array = np.empty(len(values), object) if is_text else np.asarray(values, feature.dtype)
    if is_text:
        array[:] = values
    if isinstance(feature, FixedLenFeature) and array.size != np.prod(shape, dtype=int):
        raise InvalidArgumentError(
            f"A record must hold as many values as the shape. Received: {key!r}: {feature}, "
            f"{array.size} values."
        )
    return _element(array.reshape(shape))


def _default(key: str, feature: Any, is_text: bool) -> Any:
    if isinstance(feature, FixedLenSequenceFeature):
        if not feature.allow_missing:
            raise InvalidArgumentError(
                f"A `FixedLenSequenceFeature` needs `allow_missing=True`. Received: {key!r}: {feature}."
            )
        return np.zeros((0, *feature.shape), object if is_text else feature.dtype)
    if feature.default_value is None:
        raise InvalidArgumentError(
            f"A record must hold each feature without a default value. Received: a record without {key!r}."
        )
    default = (
        feature.default_value.encode() if isinstance(feature.default_value, str) else feature.default_value
    )
    return _element(np.broadcast_to(np.asarray(default, object if is_text else feature.dtype), feature.shape))


def _element(array: np.ndarray) -> Any:
    # A string of a dataset is bytes.
    return array.item() if array.dtype == object and array.ndim == 0 else array
