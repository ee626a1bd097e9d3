import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.collectives._packing import pack, plan, unpack

ARRAYS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
        st.sampled_from(["float32", "int32", "bool", "float16"]),
    ),
    min_size=1,
    max_size=6,
)
RULES = st.sampled_from(
    [{}, {"bytes_per_pack": 16}, {"num_packs": 1}, {"num_packs": 3}, {"smaller_than": 40}]
)


# Each example compiles programs of its own.
@settings(max_examples=20, deadline=None)
@given(ARRAYS, RULES)
def test_unpack_is_the_inverse_of_pack(specs, rule):
    arrays = [(np.arange(np.prod(s)) % 2).reshape(s).astype(d) for s, d in specs]
    packing = plan(specs, **rule)
    restored = unpack(pack(arrays, packing), packing)
    for before, after in zip(arrays, restored, strict=True):
        assert after.shape == before.shape
        assert after.dtype == before.dtype
        np.testing.assert_array_equal(before, after)


@settings(max_examples=40, deadline=None)
@given(ARRAYS, RULES)
def test_every_array_travels_once_with_its_type(specs, rule):
    packing = plan(specs, **rule)
    assert sorted(i for bucket in packing.buckets for i in bucket) == list(range(len(specs)))
    assert all(len({specs[i][1] for i in bucket}) == 1 for bucket in packing.buckets)


@settings(max_examples=40, deadline=None)
@given(ARRAYS, st.integers(1, 4))
def test_there_are_no_more_buckets_than_asked_for(specs, num_packs):
    buckets = plan(specs, num_packs=num_packs).buckets
    for dtype in {d for _, d in specs}:
        assert sum(specs[bucket[0]][1] == dtype for bucket in buckets) <= num_packs


@pytest.mark.parametrize(
    ("rule", "buckets"),
    [
        ({}, ((0,), (1,), (2,))),
        ({"num_packs": 1}, ((0, 1, 2),)),
        ({"bytes_per_pack": 40}, ((0,), (1, 2))),
        ({"smaller_than": 40}, ((0,), (1, 2))),
    ],
)
def test_rules(rule, buckets):
    assert plan([((10,), "float32"), ((5,), "float32"), ((1,), "float32")], **rule).buckets == buckets


@pytest.mark.parametrize("rule", [{"num_packs": -1}, {"num_packs": 1, "bytes_per_pack": 1}])
def test_bad_rules(rule):
    with pytest.raises(ValueError, match="at most one"):
        plan([((1,), "float32")], **rule)
