"""Messages: what is packed is read back, and no other bytes do anything but raise `FrameError`."""

import json
import struct
import tracemalloc
import zlib

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from unisono.rpc import _frames as m
from unisono.rpc._frames import Frame, FrameError
from unisono.rpc._ops import Op

NAMES = st.text(st.characters(codec="utf-8"), max_size=8)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | NAMES
JSON = (
    LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(NAMES, st.lists(LEAVES, max_size=2), max_size=2)
)


@st.composite
def arrays(draw):
    """Of any dtype and shape, also not in C order. Any bytes are a value, but for truth values."""
    dtype = draw(st.sampled_from(m._DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=5))
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count))
    array = np.frombuffer(bytearray(data), np.uint8)
    array = (array % 2 if dtype == np.bool_ else array).view(dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


@st.composite
def frames(draw):
    return Frame(
        draw(st.sampled_from(Op)),
        draw(st.integers(0, 2**64 - 1)),
        draw(st.integers(0, 2**32 - 1)),
        draw(st.dictionaries(NAMES, JSON, max_size=3)),
        draw(st.lists(arrays(), max_size=3)),
    )


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@hypothesis.given(frames())
def test_a_message_is_read_as_it_was_written(frame):
    read = Frame.parse(frame.parts())
    fields = ("op", "request", "generation", "meta")
    assert [getattr(read, f) for f in fields] == [getattr(frame, f) for f in fields]
    assert len(read.arrays) == len(frame.arrays)
    assert all(map(same, read.arrays, frame.arrays))
    # And what is read can be sent on.
    assert [bytes(p) for p in read.parts()] == [bytes(p) for p in frame.parts()]


def test_arrays_are_not_copied():
    sent = [np.arange(6.0).reshape(2, 3), np.zeros(4, ml_dtypes.bfloat16)]
    parts = Frame(Op.PUSH, arrays=sent).parts()
    assert all(np.shares_memory(np.frombuffer(p, np.uint8), a) for p, a in zip(parts[2:], sent, strict=True))
    received = [bytearray(part) for part in parts]
    read = Frame.parse(received)
    for array, part in zip(read.arrays, received[2:], strict=True):
        assert np.shares_memory(array, np.frombuffer(part, np.uint8))
        assert not array.flags.writeable


def test_a_view_may_begin_at_any_byte():
    array = np.arange(5, dtype=np.float64)
    data = b"x" + array.tobytes()
    parts = [*Frame(Op.PUSH, arrays=[array]).parts()[:2], memoryview(data)[1:]]
    np.testing.assert_array_equal(Frame.parse(parts).arrays[0], array)


def test_an_answer_has_the_numbers_of_its_request():
    answer = Frame(Op.PULL, 7, 3).answer(Op.OK, {"v": 1}, [np.zeros(2)])
    assert (answer.op, answer.request, answer.generation, answer.meta) == (Op.OK, 7, 3, {"v": 1})


def test_a_blob_is_a_view():
    data = bytearray(b"program")
    assert np.shares_memory(m.blob(data), np.frombuffer(data, np.uint8))
    assert bytes(Frame.parse(Frame(Op.PROGRAM, arrays=[m.blob(b"")]).parts()).arrays[0]) == b""


# --- what cannot be sent


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (Frame(Op.PUSH, arrays=[np.array(["a"])]), "dtypes bool, int8"),
        (Frame(Op.PUSH, arrays=[np.array([None])]), r"Array 0 .* '\|O'"),
        (Frame(Op.PUSH, arrays=[np.zeros(1), np.zeros(1, ">f4")]), "Array 1 must be little endian"),
        (Frame(Op.PUSH, arrays=[np.zeros((1,) * 17)]), "at most 16 dimensions"),
        (Frame(Op.PUSH, arrays=[np.zeros(0)] * (m.MAX_ARRAYS + 1)), "at most 16384 arrays"),
        (Frame(Op.PUSH, -1), "request=-1"),
        (Frame(Op.PUSH, 1 << 64), "fit its header"),
        (Frame(Op.PUSH, 0, 1 << 32), "generation=4294967296"),
        (Frame(Op.PUSH, meta={"x": float("nan")}), "what JSON can hold"),
        (Frame(Op.PUSH, meta={"x": b""}), "what JSON can hold"),
        (Frame(Op.PUSH, meta={"x": "\ud800"}), "what JSON can hold"),
        (Frame(Op.PUSH, meta={1: 2}), "texts as keys"),
        (Frame(Op.PUSH, meta=["x"]), "texts as keys"),
        (Frame(Op.PUSH, meta={"x": "a" * m.MAX_META_BYTES}), "at most 1048576 bytes"),
        (Frame(Op.PUSH, meta={"x": [0] * (m.MAX_META_ITEMS + 1)}), "at most 131072 values"),
    ],
)
def test_what_cannot_be_sent_is_the_senders_error(frame, words):
    with pytest.raises(FrameError, match=words):
        frame.parts()


def nested(levels):
    return {"x": []} if levels == 2 else {"x": nested(levels - 1)}


def test_depth_is_limited_on_both_sides():
    assert Frame.parse(Frame(Op.OK, meta=nested(m.MAX_META_DEPTH)).parts()).meta == nested(m.MAX_META_DEPTH)
    with pytest.raises(FrameError, match="32 levels deep"):
        Frame(Op.OK, meta=nested(m.MAX_META_DEPTH + 1)).parts()
    data = json.dumps(nested(m.MAX_META_DEPTH + 1)).encode()
    with pytest.raises(FrameError, match="32 levels deep"):
        Frame.parse(raw(meta=data))


# --- what is not a message


def raw(
    magic=b"UNPS", version=1, op=2, flags=0, generation=0, request=9, count=None, length=None,
    meta=b"", shapes=b"", arrays=(), checksum=None,
):  # fmt: skip
    """A message with any fields and, unless given, a right checksum."""
    head = struct.pack(
        "<4sBBHIQHI", magic, version, op, flags, generation, request,
        len(arrays) if count is None else count, len(meta) if length is None else length,
    )  # fmt: skip
    found = zlib.crc32(head + shapes + meta) if checksum is None else checksum
    return [head + struct.pack("<I", found) + shapes, meta, *arrays]


def shape(code, dims, length, rank=None):
    rank = len(dims) if rank is None else rank
    return struct.pack(f"<BB{len(dims)}QQ", code, rank, *dims, length)


F32 = m._CODES[np.dtype(np.float32)]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], "a header and `meta`"),
        ([b"UNPS"], "a header and `meta`"),
        ([b"", b""], "at least 30 bytes"),
        (raw(magic=b"HTTP"), "begin with"),
        (raw(version=2), "must have version 1"),
        (raw(op=0), "`op` must be"),
        (raw(op=255), "`op` must be"),
        (raw(flags=1), "`flags` must be 0"),
        (raw(checksum=1), "checksum"),
        (raw(count=1), "the 1 arrays of its header"),
        (raw(arrays=[b""], count=0), "the 0 arrays of its header"),
        (raw(length=5), "the 5 bytes of its header"),
        (raw(meta=b"{}", length=0), "the 0 bytes of its header"),
        (raw(meta=b"{"), "must be JSON"),
        (raw(meta=b"[]"), "an object"),
        (raw(meta=b"1"), "an object"),
        (raw(meta=b"\xff"), "UnicodeDecodeError"),
        (raw(meta=b'{"x": NaN}'), "NaN is not part of JSON"),
        (raw(meta=b'{"x": "\\ud800"}'), "UnicodeEncodeError"),
        (raw(meta=b'{"x": ' + b"1" * 5000 + b"}"), "must be JSON"),
        (raw(meta=b"[" * 100_000), "must be JSON|levels deep"),
        (raw(meta=b'{"x":' * 1000 + b"1" + b"}" * 1000), "must be JSON|levels deep"),
        (raw(meta=b" " * (m.MAX_META_BYTES + 1)), "at most 1048576"),
        (raw(meta=b"{" + b"," * m.MAX_META_ITEMS), "at most 131072 values"),
        (raw(shapes=b"\0"), "of 0 arrays must be shorter"),
        (raw(arrays=[b""]), "describe its 1 arrays"),
        (raw(arrays=[b""], shapes=b"\0\1"), "describe its 1 arrays"),
        (raw(arrays=[b""], shapes=shape(255, [], 0)), "dtype of array 0"),
        (raw(arrays=[b""], shapes=shape(F32, [], 0, rank=17)), "at most 16 dimensions"),
        (raw(arrays=[b"1234"], shapes=shape(F32, [2], 4)), "must not have 4 bytes"),
        (raw(arrays=[b"1234"], shapes=shape(F32, [1], 4) + b"\0"), "end behind"),
        (raw(arrays=[b"123"], shapes=shape(F32, [1], 4)), "must have 4 bytes as its header says"),
        (raw(arrays=[b"12345"], shapes=shape(F32, [1], 4)), "must have 4 bytes as its header says"),
        # 2**62 floats have 2**64 bytes, which is 0 in 64 bits.
        (raw(arrays=[b""], shapes=shape(F32, [1 << 62], 0)), "must not have 0 bytes"),
        (raw(arrays=[b""], shapes=shape(F32, [0, 1 << 63], 0)), "NumPy can hold"),
        (raw(arrays=[b""], shapes=shape(F32, [0, 1 << 32, 1 << 32], 0)), "NumPy can hold"),
        (raw(arrays=[b"\2"], shapes=shape(0, [1], 1)), "Truth values"),
        (raw(arrays=[b""] * (m.MAX_ARRAYS + 1)), "at most 16384"),
        (raw(shapes=b"\0" * 3_000_000), "must be shorter"),
    ],
)
def test_what_is_no_message_is_rejected(parts, words):
    with pytest.raises(FrameError, match=words):
        Frame.parse(parts)


def test_limit():
    parts = Frame(Op.PUSH, arrays=[np.zeros(100, np.uint8)]).parts()
    size = m.total_bytes(parts)
    Frame.parse(parts, size)
    with pytest.raises(FrameError, match=f"at most {size - 1} bytes"):
        Frame.parse(parts, size - 1)


def test_the_error_names_the_request_where_it_can():
    with pytest.raises(FrameError) as caught:
        Frame.parse(raw(arrays=[b"1"], shapes=shape(F32, [1], 4), request=77))
    assert caught.value.request == 77
    with pytest.raises(FrameError) as caught:
        Frame.parse([b"?" * 64, b""])
    assert caught.value.request is None


BYTES = st.binary(max_size=120)


@hypothesis.given(st.lists(BYTES | BYTES.map(lambda b: b"UNPS\1" + b), max_size=5))
def test_random_bytes_are_no_message(parts):
    with pytest.raises(FrameError):
        Frame.parse(parts)


@hypothesis.given(
    frame=frames(),
    data=st.data(),
    kind=st.sampled_from(["flip", "cut", "lengthen", "drop", "repeat", "swap"]),
)
def test_a_message_that_was_changed_is_another_one_or_none(frame, data, kind):
    """Bytes of arrays may be any; all others are guarded by the checksum."""
    parts = [bytes(part) for part in frame.parts()]
    at = data.draw(st.integers(0, len(parts) - 1))
    if kind == "flip":
        if not parts[at]:
            return
        changed = bytearray(parts[at])
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
        mutated = [*parts[:at], bytes(changed), *parts[at + 1 :]]
        if at >= 2 and frame.arrays[at - 2].dtype != bool:
            assert not all(map(same, Frame.parse(mutated).arrays, frame.arrays))
            return
    elif kind == "cut":
        mutated = [*parts[:at], parts[at][: data.draw(st.integers(0, len(parts[at])))], *parts[at + 1 :]]
    elif kind == "lengthen":
        mutated = [*parts[:at], parts[at] + data.draw(BYTES), *parts[at + 1 :]]
    elif kind == "drop":
        mutated = parts[:at] + parts[at + 1 :]
    elif kind == "repeat":
        mutated = [*parts[:at], parts[at], *parts[at:]]
    else:
        other = data.draw(st.integers(0, len(parts) - 1))
        mutated = list(parts)
        mutated[at], mutated[other] = parts[other], parts[at]
    if [len(part) for part in mutated] == [len(part) for part in parts] and mutated[:2] == parts[:2]:
        return
    with pytest.raises(FrameError):
        Frame.parse(mutated)


DIMS = st.integers(0, 2**64 - 1)
SHAPES = st.lists(st.tuples(st.integers(0, 30), st.lists(DIMS, max_size=18), DIMS), max_size=3)


@hypothesis.given(SHAPES, st.lists(BYTES, max_size=3), BYTES, st.integers(0, 50))
def test_a_right_checksum_does_not_make_a_message(shapes, parts, meta, op):
    """Whatever is accepted has exactly the bytes that it claims."""
    packed = b"".join(struct.pack(f"<BB{len(d)}QQ", code, len(d), *d, n) for code, d, n in shapes)
    try:
        frame = Frame.parse(raw(op=op, shapes=packed, arrays=parts, meta=meta), 1000)
    except FrameError:
        return
    assert [array.nbytes for array in frame.arrays] == [len(part) for part in parts]


def test_a_header_that_claims_much_takes_no_memory():
    hostile = [
        raw(arrays=[b""], shapes=shape(F32, [1 << 30], 1 << 32)),
        raw(arrays=[b""], shapes=shape(F32, [1 << 31, 1 << 31], 0)),
        raw(length=0xFFFFFFFF),
        raw(count=0xFFFF),
        raw(meta=b'{"x":[' + b"[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[]," * 20_000),
        raw(meta=b'{"x":' + b"[" * 1_000_000),
    ]
    tracemalloc.start()
    try:
        for parts in hostile:
            with pytest.raises(FrameError):
                Frame.parse(parts, 1 << 21)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_the_table_of_dtypes_does_not_change():
    """Its positions are the codes that travel."""
    assert [dtype.name for dtype in m._DTYPES] == [
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64", "complex64", "complex128",
        "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz",
        "float8_e5m2fnuz",
    ]  # fmt: skip
