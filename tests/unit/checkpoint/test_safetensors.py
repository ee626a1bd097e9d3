"""The file of a backup's arrays: every type comes back bit for bit, and damage is an error."""

import errno
import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest

from unisono._errors import CheckpointError
from unisono.checkpoint import _safetensors
from unisono.checkpoint._safetensors import can_hold, load, save

SHAPES = [(), (1,), (3, 2), (0, 4), (5,)]


@pytest.mark.parametrize("dtype", sorted(_safetensors._CODES))
def test_every_type_and_shape_comes_back(tmp_path, dtype):
    random = np.random.default_rng(0)
    size = jnp.dtype(dtype).itemsize
    arrays = {}
    for shape in SHAPES:
        count = int(np.prod(shape))
        # Any bits, NaNs among them; a bool has two values only.
        raw = random.integers(0, 2 if dtype == "bool" else 256, count * size, dtype=np.uint8)
        arrays[f"a/{shape} ü"] = raw.view(jnp.dtype(dtype)).reshape(shape)
    save(tmp_path / "file", arrays)
    found = load(tmp_path / "file")
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
        assert found[name].flags.writeable
        assert found[name].flags.owndata


def test_the_file_is_as_the_format_says(tmp_path):
    save(tmp_path / "file", {"b": np.array([[1.0, 2.0]], "float32"), "a": np.array(7, "int64")})
    content = (tmp_path / "file").read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    assert size % 8 == 0
    assert json.loads(content[8 : 8 + size]) == {
        "b": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]},
        "a": {"dtype": "I64", "shape": [], "data_offsets": [8, 16]},
    }
    assert content[8 + size :] == struct.pack("<ffq", 1.0, 2.0, 7)


def test_strided_arrays_are_written_in_order(tmp_path):
    array = np.arange(12, dtype="int32").reshape(3, 4).T[::2]
    save(tmp_path / "file", {"a": array})
    np.testing.assert_array_equal(load(tmp_path / "file")["a"], array)


def test_what_the_format_cannot_hold():
    assert can_hold("a", np.zeros(1, "uint8"))
    for dtype in ("complex128", ">f4", "float128", "U3"):
        assert not can_hold("a", np.zeros(1, dtype))
    assert not can_hold("a", np.zeros(1, jnp.int4))
    assert not can_hold("__metadata__", np.zeros(1))


def test_metadata_of_other_programs_is_no_array(tmp_path):
    header = json.dumps({"__metadata__": {"format": "pt"}}).encode()
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header)
    assert load(tmp_path / "file") == {}


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_a_cut_file_is_an_error(tmp_path, cut):
    save(tmp_path / "file", {"a": np.zeros(5)})
    content = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(content[:cut])
    with pytest.raises(CheckpointError, match="must be readable"):
        load(tmp_path / "file")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F7", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]},
        {"dtype": "F32", "shape": [1 << 70], "data_offsets": [0, 1 << 72]},
        {"dtype": "F32", "shape": [0, 1 << 70], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [0], "data_offsets": [1 << 70, 1 << 70]},
        ["F32"],
    ],
)
def test_a_wrong_header_is_an_error(tmp_path, entry):
    header = json.dumps({"a": entry}).encode()
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(CheckpointError, match="must be readable"):
        load(tmp_path / "file")


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 8 + b"{}",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (9999).to_bytes(8, "little") + b"[" * 9999,
    ],
    ids=["2^64 bytes", "2^40 bytes", "deep"],
)
def test_no_memory_is_taken_for_what_is_not_in_the_file(tmp_path, content):
    """Such as the 2^63 bytes of a damaged header."""
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match="must be readable"):
        load(tmp_path / "file")


def test_nothing_is_overwritten(tmp_path):
    save(tmp_path / "file", {})
    with pytest.raises(FileExistsError):
        save(tmp_path / "file", {"a": np.zeros(1)})


class Turn:
    """An array that all workers read together, each when it is its turn."""

    def __init__(self, taken):
        self.shape, self.dtype, self.nbytes, self.taken = (2,), np.dtype("f4"), 8, taken

    def __array__(self, dtype=None, copy=None):
        self.taken.append(self)
        return np.arange(2, dtype="f4")


@pytest.mark.parametrize("fails", ["at the first byte", "later"])
def test_where_the_disk_is_full_every_array_is_read_all_the_same(tmp_path, fails):
    """The other workers read each together with this one, and know nothing of its disk."""
    taken = []
    arrays = {str(i): Turn(taken) for i in range(3)}
    save(tmp_path / "file", arrays)
    assert taken == list(arrays.values())
    assert np.asarray(load(tmp_path / "file")["2"]).tolist() == [0, 1]
    taken.clear()

    def full(piece):
        if fails == "later" and len(taken) == 2:
            raise OSError(errno.ENOSPC, "full")

    # A folder cannot be made where a file is.
    path = tmp_path / "file" / "below" if fails == "at the first byte" else tmp_path / "other"
    with pytest.raises(OSError, match=r"full|directory|exists"):
        save(path, arrays, full)
    assert taken == list(arrays.values())
