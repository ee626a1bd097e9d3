import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono import InputOptions
from unisono.data._sharding import balanced_sizes, split_points


@given(st.integers(0, 1000), st.integers(1, 20))
def test_sizes_are_balanced(total, parts):
    sizes = balanced_sizes(total, parts)
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(st.integers(0, 100), st.integers(1, 9))
def test_points_cover_all_rows_in_order(total, parts):
    points = split_points(total, parts)
    assert points[0][0] == 0
    assert points[-1][1] == total
    assert all(a[1] == b[0] for a, b in itertools.pairwise(points))


@pytest.mark.parametrize(("total", "parts"), [(-1, 2), (3, 0)])
def test_bad_numbers(total, parts):
    with pytest.raises(ValueError, match="Received"):
        balanced_sizes(total, parts)


@pytest.mark.parametrize(
    "options",
    [{"experimental_place_dataset_on_device": True}, {"experimental_per_replica_buffer_size": -1}],
)
def test_bad_options(options):
    with pytest.raises(ValueError, match="Received"):
        InputOptions(**options)
