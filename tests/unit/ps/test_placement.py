"""Placement of variables on servers, by bytes."""

import random

import pytest

from unisono import InvalidArgumentError
from unisono.ps._placement import Placement


def test_equal_sizes_go_round_robin():
    placement = Placement(3)
    assert [placement.place(8) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_no_server_holds_more_than_the_average_and_the_largest_variable():
    sizes = [random.Random(3).choice([4, 400, 40_000, 3_000_000]) for _ in range(100)]
    placement = Placement(4)
    for size in sizes:
        placement.place(size)
    assert sum(placement.nbytes) == sum(sizes)
    assert max(placement.nbytes) <= sum(sizes) / 4 + max(sizes)


def test_variables_without_elements_are_spread():
    placement = Placement(2)
    assert [placement.place(0) for _ in range(4)] == [0, 1, 0, 1]


def test_bad_arguments():
    with pytest.raises(InvalidArgumentError, match="Received: 0 servers"):
        Placement(0)
    with pytest.raises(InvalidArgumentError, match="Received: -1 bytes"):
        Placement(1).place(-1)
