"""Fingerprints: published values, and the properties that hashes of columns need."""

import numpy as np

from unisono.preprocessing._fingerprints import crossed_buckets, decimal_strings, hash_buckets, on_host


def test_numbers_are_hashed_as_decimals():
    numbers = np.array([3, -12])
    assert hash_buckets(numbers, 99).tolist() == hash_buckets(on_host(["3", "-12"], "test"), 99).tolist()
    assert decimal_strings(np.array([2.9])).tolist() == [b"2"]


def test_trailing_zero_bytes_count():
    a, b = hash_buckets(on_host([b"a", b"a\0"], "test"), 10**9)
    assert a != b


def test_crosses_broadcast_and_depend_on_order():
    first, second = on_host([["a"], ["b"]], "test"), on_host([["a", "b"]], "test")
    crossed = crossed_buckets([first, second], 10**9)
    assert crossed.shape == (2, 2)
    assert crossed[0, 1] != crossed[1, 0]


def test_empty_arrays():
    assert hash_buckets(np.empty((0, 2), object), 5).shape == (0, 2)
