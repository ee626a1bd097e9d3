"""FarmHash in NumPy has the numbers of FarmHash's own code, for every length of a string."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from unisono.preprocessing._farmhash import fingerprints_of

#: Each class of lengths, both ends of it, and lengths with one block of 64 bytes, several and a rest.
LENGTHS = [0, 1, 2, 3, 4, 7, 8, 16, 17, 32, 33, 64, 65, 127, 128, 129, 192, 1000]

NUMBERS = [
    11160318154034397263,
    5161771770385946686,
    17348493801328108482,
    4662423180930907492,
    13909349088106176104,
    17233423938440663304,
    12627020141284786728,
    9887023220782602712,
    16960068419638019727,
    3992320350721670009,
    12457070707786611405,
    11083064061832698092,
    444801980686921533,
    5926385096735868780,
    15838856113771212233,
    5067021833811671751,
    2449078334170002338,
    14110994584816394816,
]


def text(length):
    return bytes((7 * i + length) % 256 for i in range(length))


def test_each_class_of_lengths_has_its_numbers():
    """The numbers are those of cityhash 0.4.10, which has FarmHash's code."""
    assert fingerprints_of([text(length) for length in LENGTHS]).tolist() == NUMBERS


def test_all_lengths_and_neighbours_are_those_of_farmhash():
    farmhash = pytest.importorskip("farmhash")
    random = np.random.default_rng(0)
    texts = [random.bytes(length) for length in random.permutation(300)]
    assert fingerprints_of(texts).tolist() == list(map(farmhash.Fingerprint64, texts))


@hypothesis.given(st.lists(st.binary(max_size=200), max_size=20))
def test_a_string_has_the_number_that_it_has_alone(texts):
    assert fingerprints_of(texts).tolist() == [int(fingerprints_of([text])[0]) for text in texts]
