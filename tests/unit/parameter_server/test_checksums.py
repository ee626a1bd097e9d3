"""Checksums of bytes and of rows find any single bit that differs."""

import numpy as np
import pytest

from unisono.parameter_server.state import _checksums
from unisono.parameter_server.state._checksums import checksum, row_checksums


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((5, 3), "float32"), ((4,), "float64"), ((3, 5), "int8"), ((2, 2, 2), "bfloat16"), ((6,), "bool")],
)
def test_each_bit_of_a_row_counts_in_its_row_alone(shape, dtype):
    import ml_dtypes  # noqa: F401 (the name of bfloat16)

    rows = (np.random.default_rng(1).normal(size=shape) * 50).astype(dtype)
    expected = row_checksums(rows)
    assert (expected.shape, expected.dtype) == (shape[:1], np.uint32)
    damaged = rows.copy()
    raw = damaged.view(np.uint8).reshape(-1)
    for bit in range(8 * raw.size):
        raw[bit // 8] ^= 1 << bit % 8
        where = bit // 8 // (raw.size // shape[0])
        assert np.flatnonzero(row_checksums(damaged) != expected).tolist() == [where]
        raw[bit // 8] ^= 1 << bit % 8


def test_each_word_counts_also_in_its_highest_bit():
    """Times an even number it would be lost."""
    assert (_checksums._factors(1000) % 2 == 1).all()


def test_rows_without_bytes_and_no_rows():
    assert row_checksums(np.empty((3, 0), "float32")).tolist() == [0, 0, 0]
    assert row_checksums(np.empty((0, 4), "float32")).tolist() == []
    assert row_checksums(np.zeros((2, 5), "float32")).tolist() == [0, 0]


def test_bytes_in_pieces_have_the_checksum_of_the_whole(monkeypatch):
    monkeypatch.setattr(_checksums, "PIECE", 1000)
    data = np.random.default_rng(0).integers(0, 256, 2500, np.uint8)
    whole = checksum(data)
    assert checksum(data[2000:], checksum(data[1000:2000], checksum(data[:1000].tobytes()))) == whole
    for bit in (0, 8 * 1000, 8 * 2500 - 1):
        data[bit // 8] ^= 1 << bit % 8
        assert checksum(data) != whole
        data[bit // 8] ^= 1 << bit % 8
    assert checksum(data[:-1]) != whole
