"""The file format of `cache(filename)`: JSON headers and raw bytes; reading it executes nothing.

    magic line | element ... | offset of each element (int64) | number of elements | offset of the offsets |
    magic line

An element is the length of its header (uint64), the header, and the bytes of its components in sequence.

Tests: tests/unit/data/test_dataset_cache.py.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import struct
from collections.abc import Mapping, Sequence
from typing import IO, Any, Literal, TypeAlias

import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono.data._pipeline._structure import Element, check_no_dataset, leaves, name_of

#: The structure of an element for JSON: None, "leaf", or a dict with the keys or the tuple's type and the
#: parts.
Tree: TypeAlias = "dict[str, Any] | Literal['leaf'] | None"

#: With the version of the format. At both ends: a file that was truncated or is still being written lacks the
#: second.
_MAGIC = b"unisono cache 1\n"
# Little-endian on every machine, like the offsets: a cache file may be shared by machines.
_LENGTH = struct.Struct("<Q")
_END = struct.Struct(f"<QQ{len(_MAGIC)}s")


def begin(file: IO[bytes]) -> None:
    """Write the first line."""
    file.write(_MAGIC)


def append(file: IO[bytes], element: Element) -> int:
    """Write an element at the end of the file.

    Raises:
        InvalidTypeError: A component has a dtype that is not numpy's own.
    """
    offset = file.seek(0, os.SEEK_END)
    parts: list[bytes] = []
    header = json.dumps(
        {"leaves": [_leaf_header(*leaf, parts) for leaf in leaves(element)], "tree": _tree(element)}
    )
    encoded = header.encode()
    file.write(_LENGTH.pack(len(encoded)) + encoded)
    for part in parts:
        file.write(part)
    return offset


def end(file: IO[bytes], offsets: Sequence[int]) -> None:
    """Write the offset of each element, which makes the file complete."""
    # At the end: the number of elements is often unknown until the last one was written.
    start = file.seek(0, os.SEEK_END)
    file.write(np.array(offsets, "<i8").tobytes())
    file.write(_END.pack(len(offsets), start, _MAGIC))
    file.flush()


def read_offsets(file: IO[bytes], path: str) -> np.ndarray:
    """Read the offset of each element."""
    length = file.seek(0, os.SEEK_END)
    if length >= _END.size:
        file.seek(length - _END.size)
        count, start, magic = _END.unpack(file.read(_END.size))
        # The arithmetic must agree, too: a truncated or concatenated file may end in the magic line by
        # chance.
        if magic == _MAGIC and start + 8 * count + _END.size == length:
            file.seek(start)
            return np.frombuffer(file.read(8 * count), "<i8")
    raise InvalidArgumentError(
        "The file of cache(filename) must be a complete cache, or not exist. "
        f"Received: filename={path!r}, {length} bytes that are not a complete cache. "
        "Delete the file, or pass another name."
    )


def read(file: IO[bytes], offset: int) -> Element:
    """Read the element at `offset`."""
    file.seek(offset)
    (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
    header = json.loads(file.read(length))
    return _build(header["tree"], [_read_leaf(file, leaf) for leaf in header["leaves"]])


def _tree(element: Element) -> Tree:
    if isinstance(element, tuple):
        kind = [type(element).__name__, *getattr(element, "_fields", ())]
        return {"tuple": kind, "parts": [_tree(part) for part in element]}
    if isinstance(element, Mapping):
        return {"keys": list(element), "parts": [_tree(part) for part in element.values()]}
    return None if element is None else "leaf"


def _build(tree: Tree, parts: list[Any]) -> Element:
    if tree is None:
        return None
    if tree == "leaf":
        return parts.pop(0)
    built = [_build(part, parts) for part in tree["parts"]]
    if "keys" in tree:
        return dict(zip(tree["keys"], built, strict=True))
    name, *fields = tree["tuple"]
    return _named(name, tuple(fields))._make(built) if fields else tuple(built)


@functools.cache
def _named(name: str, fields: tuple[str, ...]) -> Any:
    # Cached, so that elements of one file have one class; the user's own class is not in the file.
    return collections.namedtuple(name, fields)


def _leaf_header(path: tuple[Any, ...], leaf: Any, parts: list[bytes]) -> dict[str, Any]:
    check_no_dataset(leaf, path, "written to a file")
    # As an object, because NumPy's own byte strings lose trailing zero bytes.
    array = np.asarray(leaf, object) if isinstance(leaf, bytes) else np.asarray(leaf)
    if array.dtype == object:
        strings = array.ravel().tolist()
        parts.extend(strings)
        return {"strings": [len(string) for string in strings], "shape": array.shape}
    # bfloat16 and its like: NumPy names them `V`, which says only how many bytes they have when read back.
    if array.dtype.kind == "V":
        raise InvalidTypeError(
            "The components that cache(filename) writes must have numpy's own dtypes. "
            f"Received: {name_of(path)} with dtype {array.dtype}. "
            "Write cache() to keep it in memory, or cast it with map()."
        )
    parts.append(array.tobytes())
    return {"dtype": array.dtype.str, "shape": array.shape}


def _read_leaf(file: IO[bytes], header: Mapping[str, Any]) -> np.ndarray | np.generic | bytes:
    shape = tuple(header["shape"])
    if "strings" in header:
        array = np.empty(len(header["strings"]), object)
        for index, length in enumerate(header["strings"]):
            array[index] = file.read(length)
    else:
        dtype = np.dtype(header["dtype"])
        # `prod` of an empty shape is a float without the dtype.
        array = np.frombuffer(file.read(dtype.itemsize * int(np.prod(shape, dtype=np.int64))), dtype)
    # `[()]` makes a scalar of an array of rank 0, and leaves other arrays as they are.
    return array.reshape(shape)[()]
