"""Placement of variables on servers, by bytes."""

import random

import numpy as np
import pytest

from unisono import InvalidArgumentError
from unisono.parameter_server.chief._placement import Division, Placement, VariablePart


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


def test_parts_are_placed_one_by_one_and_make_the_whole():
    placement = Placement(3)
    assert placement.place(100) == 0
    value = np.arange(14.0).reshape(7, 2)
    division = placement.divide(value.shape, 56, 4)
    assert [p.rows for p in division.parts] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert [p.server for p in division.parts] == [1, 2, 1, 2]
    assert placement.nbytes == (100, 32, 24)
    assert [p.rows for p in division.on(2)] == [(2, 4), (6, 7)]
    assert division.parts[3].shape((7, 2)) == (1, 2)
    np.testing.assert_array_equal(division.joined([p.of(value) for p in division.pulled]), value)


def test_a_whole_variable_may_lie_on_several_servers():
    copies = Division.copies([2, 0])
    assert (copies.is_divided, copies.servers, copies.pulled) == (False, (2, 0), (VariablePart(2),))
    whole = Placement(2).divide((4,), 16, 1)
    assert whole == Division((VariablePart(0),))
    np.testing.assert_array_equal(whole.joined([np.arange(4)]), np.arange(4))


def test_bad_arguments():
    with pytest.raises(InvalidArgumentError, match="Received: 0 servers"):
        Placement(0)
    with pytest.raises(InvalidArgumentError, match="Received: -1 bytes"):
        Placement(1).place(-1)


def test_what_was_removed_does_not_count():
    placement = Placement(2)
    whole = placement.divide((10, 4), 160, 1)
    parts = placement.divide((5, 2), 40, 2)
    before = placement.nbytes
    more = [placement.divide(shape, nbytes, 2) for shape, nbytes in (((7, 1), 28), ((3, 0), 0))]
    for division, shape, nbytes in zip(more, ((7, 1), (3, 0)), (28, 0), strict=True):
        placement.remove(division, shape, nbytes)
    assert placement.nbytes == before
    placement.remove(whole, (10, 4), 160)
    placement.remove(parts, (5, 2), 40)
    assert placement.nbytes == (0, 0)
