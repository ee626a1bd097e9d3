"""The messages between the tasks of a cluster: a header, a JSON object and raw arrays.

A message has several parts, which the transport keeps apart. All numbers are little endian:

====  ===============================================================================================
part  content
====  ===============================================================================================
0     the header: magic `UNPS`, version u8, op u8, flags u16 (0), generation u32, request u64,
      number of arrays u16, length of part 1 u32, CRC-32 of the header (without this field) and of
      part 1; then for each array: dtype u8, rank u8, each dimension u64, length in bytes u64
1     `meta`: a JSON object in UTF-8, or nothing for an empty one
2...  the arrays in C order, one in each part, without copies
====  ===============================================================================================

`Frame.parse` checks all of it before it makes an array, and an array is a view of its part: a message takes
no memory besides its own bytes, whatever its header claims.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import ml_dtypes
import numpy as np

from unisono._errors import ClusterError
from unisono.rpc._ops import Op

#: Anything with a buffer of bytes.
Part: TypeAlias = "bytes | bytearray | memoryview"
#: An array of any shape and dtype.
AnyArray: TypeAlias = "np.ndarray[Any, Any]"

VERSION = 1
#: Bytes of a message at most, by default. A larger variable travels in several messages.
DEFAULT_LIMIT = 1 << 30
#: Limits of a message, whatever the limit of its bytes.
MAX_META_BYTES = 1 << 20
MAX_META_DEPTH = 32
MAX_ARRAYS = 1 << 14
MAX_RANK = 16
#: Values, and commas in texts, of `meta`: a byte of JSON such as `[` takes up to 64 as a Python object.
MAX_META_ITEMS = 1 << 17
#: NumPy counts bytes in a signed number of 64 bits, and refuses larger shapes also where a dimension is 0.
_MAX_SPAN = 1 << 62

_MAGIC = b"UNPS"
_FIXED = struct.Struct("<4sBBHIQHII")
_BEFORE_CHECKSUM = _FIXED.size - 4

#: The dtypes by their code. A code never changes its meaning: new ones are appended.
_DTYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(kind)
    for kind in (
        np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
        np.float16, np.float32, np.float64, np.complex64, np.complex128,
        ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3b11fnuz,
        ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz,
    )
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_DIMS = tuple(struct.Struct(f"<{rank + 1}Q") for rank in range(MAX_RANK + 1))
_BOOL = np.dtype(np.bool_)
_OPS = {int(op): op for op in Op}
#: Descriptions of arrays with more bytes are not kept.
_KEPT_BYTES = 1 << 12


#: Arrays lie at multiples of this in memory and files: JAX uses them where they are.
ALIGNMENT = 64


class FrameError(ClusterError):
    """Bytes that are not a message, or a message that cannot be sent.

    Args:
        text: which field is wrong, and what it must be.
        request: the number of the request where the message shows one, for an answer that rejects it.
    """

    def __init__(self, text: str, request: int | None = None) -> None:
        super().__init__(text)
        self.request = request


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Frame:
    """A message.

    Args:
        request: the number of the request. An answer has its request's.
        meta: what `json` writes: names, versions, numbers. At most 1 MiB.
        arrays: little endian. Those that are not in C order are copied; the others must not change until the
            message was sent. In a message that was received they are read-only views of its parts, and not
            necessarily aligned.

    >>> frame = Frame(Op.PULL, 7, meta={"names": ["w"]}, arrays=[np.arange(3, dtype=np.int32)])
    >>> parts = frame.parts()
    >>> [len(part) for part in parts], Frame.parse(parts)
    ([48, 15, 12], Frame(PULL, request 7, 1 array of 12 bytes))
    """

    op: Op
    request: int = 0
    generation: int = 0
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arrays: Sequence[AnyArray] = ()

    def __repr__(self) -> str:
        count = f"{len(self.arrays)} array{'s' * (len(self.arrays) != 1)}"
        size = sum(array.nbytes for array in self.arrays)
        return f"Frame({self.op.name}, request {self.request}, {count} of {size} bytes)"

    def answer(self, op: Op, meta: Mapping[str, Any] | None = None, arrays: Sequence[AnyArray] = ()) -> Frame:
        """Return an answer to this message: it has the same request and generation."""
        return Frame(op, self.request, self.generation, {} if meta is None else meta, arrays)

    def parts(self, limit: int | None = None) -> list[bytes | memoryview]:
        """Return the message as bytes; the arrays are not copied.

        Raises:
            FrameError: when a field has no place in a message, or it has more bytes than `limit`.
        """
        meta = _pack_meta(self.meta)
        if len(self.arrays) > MAX_ARRAYS:
            raise FrameError(
                f"A message must have at most {MAX_ARRAYS} arrays. Received: {len(self.arrays)}."
            )
        arrays = [_in_order(position, array) for position, array in enumerate(self.arrays)]
        shapes = b"".join([_pack_shape(array.dtype, array.shape) for array in arrays])
        head = (_MAGIC, VERSION, self.op, 0, self.generation, self.request, len(arrays), len(meta), 0)
        try:
            fixed = _FIXED.pack(*head)[:_BEFORE_CHECKSUM]
        except struct.error as error:
            raise FrameError(
                f"The numbers of a message must fit its header ({error}). Received: {self.op!r}, "
                f"request={self.request}, generation={self.generation}."
            ) from None
        header = b"".join((fixed, _checksum(fixed, shapes, meta), shapes))
        # As bytes: `memoryview` has no format for bfloat16.
        flat: list[Any] = [array.reshape(-1).view(np.uint8) for array in arrays]
        parts: list[bytes | memoryview] = [header, meta, *(memoryview(each) for each in flat)]
        if limit is not None and total_bytes(parts) > limit:
            _fail(
                f"A message must have at most {limit} bytes, so that its receiver accepts it",
                total_bytes(parts),
            )
        return parts

    @classmethod
    def parse(cls, parts: Sequence[Part], limit: int = DEFAULT_LIMIT) -> Frame:
        """Return the message of some bytes.

        Args:
            parts: as they were received. The arrays of the result are views of them.
            limit: bytes of all parts at most.

        Raises:
            FrameError: when they are not a message.
        """
        views = [_read_only(part) for part in parts]
        if len(views) < 2:
            raise FrameError(f"A message must have a header and `meta`. Received: {len(views)} parts.")
        size = total_bytes(views)
        if size > limit:
            raise FrameError(f"A message must have at most {limit} bytes. Received: {size}.")
        header, data = views[0], views[1]
        op, generation, request, count = _read_header(header, data, len(views) - 2)
        try:
            # The messages of a job's steps describe the same arrays.
            read = _kept_shapes if len(header) <= _KEPT_BYTES else _read_shapes
            shapes = read(bytes(header[_FIXED.size :]), count)
            for position, ((_, _, length), view) in enumerate(zip(shapes, views[2:], strict=True)):
                if len(view) != length:
                    _fail(f"Array {position} must have {length} bytes as its header says", len(view))
            meta = _read_meta(data)
            arrays = [_as_array(*shape, view) for shape, view in zip(shapes, views[2:], strict=True)]
        except FrameError as error:
            error.request = request
            raise
        return cls(op, request, generation, meta, arrays)


def _read_only(part: Part) -> memoryview:
    view = memoryview(part)
    # As from this library's transport: bytes already.
    is_plain = view.format == "B" and view.ndim == 1 and view.contiguous
    return view.toreadonly() if is_plain else view.toreadonly().cast("B")


def blob(data: Part) -> AnyArray:
    """Return opaque bytes, such as a program, as an array for a message; nothing is copied.

    >>> blob(b"ab")
    array([97, 98], dtype=uint8)
    """
    view = memoryview(data).cast("B")
    return np.ndarray((len(view),), np.uint8, view)


def aligned(size: int) -> int:
    """Return the next multiple of the alignment.

    >>> aligned(1), aligned(128)
    (64, 128)
    """
    return -(-size // ALIGNMENT) * ALIGNMENT


@functools.cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return a dtype's name; NumPy computes it each time, which takes 5 µs."""
    return dtype.name


def total_bytes(parts: Sequence[Part]) -> int:
    """Return how many bytes some parts have.

    >>> total_bytes([b"ab", memoryview(b"cde")])
    5
    """
    return sum(map(len, parts))


def _fail(text: str, received: object, request: int | None = None) -> NoReturn:
    raise FrameError(f"{text}. Received: {received!r}.", request)


def _checksum(fixed: Part, shapes: Part, meta: Part) -> bytes:
    return zlib.crc32(meta, zlib.crc32(shapes, zlib.crc32(fixed))).to_bytes(4, "little")


def _in_order(position: int, array: AnyArray) -> AnyArray:
    array = np.asarray(array)
    if array.dtype not in _CODES:
        _fail(
            f"Array {position} must be little endian and have one of the dtypes "
            f"{', '.join(dtype.name for dtype in _DTYPES)}",
            array.dtype.str,
        )
    if array.ndim > MAX_RANK:
        _fail(f"Array {position} must have at most {MAX_RANK} dimensions", array.ndim)
    # `ascontiguousarray` would give a scalar a dimension; but a scalar is in C order.
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


@functools.lru_cache(1024)
def _pack_shape(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    kind = bytes((_CODES[dtype], len(shape)))
    return kind + _DIMS[len(shape)].pack(*shape, math.prod(shape) * dtype.itemsize)


def _pack_meta(meta: Mapping[str, Any]) -> bytes:
    if not meta:
        return b""
    try:
        data = _ENCODER.encode(meta).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"`meta` of a message must be what JSON can hold: {error}.") from None
    # What is sent can be read: a limit is the sender's error. Keys such as 1 would become texts.
    _check_meta(data)
    _check_depth(meta, data)
    if not isinstance(meta, dict) or not all(isinstance(key, str) for key in meta):
        _fail("`meta` of a message must be a dict with texts as keys", meta)
    return data


def _read_header(header: memoryview, meta: memoryview, arrays: int) -> tuple[Op, int, int, int]:
    """Check all of the header but the shapes; return op, generation, request and number of arrays."""
    if len(header) < _FIXED.size:
        _fail(f"A header must have at least {_FIXED.size} bytes", len(header))
    magic, version, op, flags, generation, request, count, length, checksum = _FIXED.unpack_from(header)
    if magic != _MAGIC:
        _fail(f"A message must begin with {_MAGIC!r}", magic)
    if version != VERSION:
        _fail(
            f"A message must have version {VERSION}: all tasks run one version of Unisono", version, request
        )
    if count > MAX_ARRAYS or count != arrays:
        _fail(f"A message must have the {count} arrays of its header, at most {MAX_ARRAYS}", arrays, request)
    # The largest header of 16384 arrays has 2.3 MB.
    if len(header) > _FIXED.size + count * (2 + 8 * (MAX_RANK + 1)):
        _fail(f"The header of {count} arrays must be shorter", len(header), request)
    if length != len(meta) or length > MAX_META_BYTES:
        _fail(
            f"`meta` must have the {length} bytes of its header, at most {MAX_META_BYTES}", len(meta), request
        )
    computed = _checksum(header[:_BEFORE_CHECKSUM], header[_FIXED.size :], meta)
    if checksum != int.from_bytes(computed, "little"):
        _fail("The checksum of a message must be that of its header", checksum, request)
    if op not in _OPS:
        _fail(f"`op` must be one of {sorted(_OPS)}", op, request)
    if flags:
        _fail("`flags` must be 0", flags, request)
    return _OPS[op], generation, request, count


def _read_shapes(header: bytes, count: int) -> Sequence[tuple[np.dtype[Any], tuple[int, ...], int]]:
    """Return dtype, shape and length in bytes of each array, of the header behind its fixed part."""
    shapes = []
    at = 0
    for position in range(count):
        if len(header) < at + 2:
            _fail(f"A header must describe its {count} arrays", position)
        code, rank = header[at], header[at + 1]
        if code >= len(_DTYPES):
            _fail(f"The dtype of array {position} must be below {len(_DTYPES)}", code)
        if rank > MAX_RANK:
            _fail(f"Array {position} must have at most {MAX_RANK} dimensions", rank)
        numbers = _DIMS[rank]
        if len(header) < at + 2 + numbers.size:
            _fail(f"A header must describe its {count} arrays", position)
        *shape, length = numbers.unpack_from(header, at + 2)
        at += 2 + numbers.size
        dtype = _DTYPES[code]
        if math.prod(shape) * dtype.itemsize != length:
            _fail(f"Array {position} of the shape {tuple(shape)} must not have {length} bytes", dtype.name)
        # A dimension of 0 hides the others from the check above.
        if length == 0 and math.prod(max(n, 1) for n in shape) * dtype.itemsize > _MAX_SPAN:
            _fail(f"Array {position} must have a shape that NumPy can hold", tuple(shape))
        shapes.append((dtype, tuple(shape), length))
    if at != len(header):
        _fail(
            f"A header must end behind its {count} arrays, at byte {_FIXED.size + at}",
            _FIXED.size + len(header),
        )
    return tuple(shapes)


_kept_shapes = functools.lru_cache(64)(_read_shapes)


def _as_array(dtype: np.dtype[Any], shape: tuple[int, ...], length: int, view: memoryview) -> AnyArray:
    array: AnyArray = np.ndarray(shape, dtype, view)
    # NumPy's own operations assume that a truth value is 0 or 1.
    if dtype == _BOOL and length and array.view(np.uint8).max() > 1:
        _fail("Truth values must be 0 or 1", int(array.view(np.uint8).max()))
    return array


def _check_meta(data: bytes) -> None:
    if len(data) > MAX_META_BYTES:
        _fail(f"`meta` must have at most {MAX_META_BYTES} bytes", len(data))
    items = data.count(b",") + data.count(b"[") + data.count(b"{")
    if items > MAX_META_ITEMS:
        _fail(f"`meta` must have at most {MAX_META_ITEMS} values", items)


def _read_meta(view: memoryview) -> dict[str, Any]:
    data = bytes(view)
    if not data:
        return {}
    _check_meta(data)
    try:
        meta = _DECODER.decode(data.decode())
        if b"\\u" in data:
            # Half of a surrogate pair has no bytes, and fails where the text is written.
            json.dumps(meta, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FrameError(
            f"`meta` must be JSON in UTF-8. Received: {type(error).__name__}: {error}."
        ) from None
    if not isinstance(meta, dict):
        _fail("`meta` must be an object", type(meta).__name__)
    _check_depth(meta, data)
    return meta


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not part of JSON")


# Kept: `json.dumps` and `json.loads` with options make one for each message.
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _check_depth(meta: object, data: bytes) -> None:
    if data.count(b"[") + data.count(b"{") <= MAX_META_DEPTH:
        return
    level = [meta]
    for _ in range(MAX_META_DEPTH):
        level = [inner for each in level for inner in _containers_in(each)]
        if not level:
            return
    raise FrameError(f"`meta` must be at most {MAX_META_DEPTH} levels deep. Received: more.")


def _containers_in(value: Any) -> list[object]:
    values = value.values() if isinstance(value, dict) else value
    return [inner for inner in values if isinstance(inner, (dict, list, tuple))]
