"""Large arrays of a checkpoint are read where they are needed: from a file, or from another process."""

import jax.numpy as jnp
import numpy as np
import pytest

from unisono._errors import CheckpointError
from unisono.checkpoint import _safetensors, _unread_arrays
from unisono.checkpoint._snapshot import Copies, Snapshot
from unisono.checkpoint._unread_arrays import FileArray, SentArray
from unisono.collectives._process_group import SingleProcessGroup

ARRAYS = {
    "small": np.arange(3, dtype="i4"),
    "float": np.arange(60, dtype="f4").reshape(12, 5),
    "half": np.arange(99).astype(jnp.bfloat16),
    "copies": np.arange(80, dtype="f8").reshape(2, 40),
}
FACTS = {"states": {}, "values": {}, "copies": ["copies"]}


@pytest.fixture
def found(tmp_path, tuned):
    tuned(_safetensors, LARGE=100)
    # Several pieces, of which the last is shorter.
    tuned(_unread_arrays, _PIECE=64)
    _safetensors.save(tmp_path / "file", ARRAYS)
    return _safetensors.load(tmp_path / "file")


def assert_same(array, wanted):
    array = np.asarray(array)
    assert (array.shape, array.dtype, array.tobytes()) == (wanted.shape, wanted.dtype, wanted.tobytes())
    assert array.flags.writeable


def test_an_array_is_read_when_its_file_has_no_name_any_more(tmp_path, found):
    assert [type(a) for a in found.values()] == [np.ndarray, FileArray, FileArray, FileArray]
    (tmp_path / "file").unlink()
    for name, wanted in ARRAYS.items():
        assert (found[name].shape, found[name].nbytes) == (wanted.shape, wanted.nbytes)
        assert_same(found[name], wanted)
    assert np.asarray(found["float"], "f8").dtype == "f8"


def test_a_file_that_is_cut_later(tmp_path, found):
    with (tmp_path / "file").open("r+b") as file:
        file.truncate(200)
    with pytest.raises(CheckpointError, match="ends before byte"):
        np.asarray(found["half"])


class Line(SingleProcessGroup):
    """The first of two processes, and then the second, which gets what the first has sent."""

    def __init__(self, line, sends):
        super().__init__()
        self.line, self.sends = line, sends

    def from_chief(self, make):
        if self.sends:
            self.line.append(make())
            return self.line[-1]
        return self.line.pop(0)


def test_a_snapshot_is_sent_array_by_array(found):
    line = []
    first = Snapshot(found, FACTS)
    data = first.to_bytes()
    # Large arrays are not in the message, but for copies, which have a form of their own.
    assert len(data) < 1200
    sent = first.sent(Line(line, True)).on_host()
    received = Snapshot.from_bytes(data, Line(line, False)).on_host()
    assert [type(a) for a in received.values()] == [np.ndarray, SentArray, SentArray, Copies]
    for name, wanted in ARRAYS.items():
        assert not line
        np.testing.assert_array_equal(np.asarray(sent[name]), wanted)
        assert max(map(len, line), default=0) <= 64
        np.testing.assert_array_equal(np.asarray(received[name]), wanted)
