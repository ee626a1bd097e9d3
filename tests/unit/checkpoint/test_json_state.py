"""What JSON does not know goes through a checkpoint unchanged."""

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono._errors import InvalidTypeError
from unisono.checkpoint._json_state import decode, encode
from unisono.checkpoint._rng_state import RandomState

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner) | st.sets(st.integers())
    ),
    max_leaves=20,
)


def through(value):
    arrays = {}
    text = json.dumps(encode(value, arrays, "x"))
    return decode(json.loads(text), arrays)


@given(VALUES)
def test_values_come_back_with_their_types(value):
    back = through(value)
    assert back == value
    assert repr(type(back)) == repr(type(value))


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinities(value):
    assert through({"best": value}) == {"best": value}


def test_arrays_are_kept_apart_and_come_back_as_they_were():
    arrays = {}
    value = {"best_weights": [np.ones((2, 3), "f4"), np.zeros(0)], "n": np.int32(4), "b": np.bool_(True)}
    encoded = encode(value, arrays, "stop")
    assert len(arrays) == 4
    assert "[[" not in json.dumps(encoded)
    back = decode(json.loads(json.dumps(encoded)), arrays)
    np.testing.assert_array_equal(back["best_weights"][0], np.ones((2, 3)))
    assert back["best_weights"][0].dtype == np.float32
    assert back["n"].dtype == np.int32
    assert bool(back["b"]) is True


def test_a_dict_that_looks_like_ours_is_no_trap():
    assert through({"__kind__": "tuple", "items": [1]}) == {"__kind__": "tuple", "items": [1]}


def test_what_cannot_be_kept_is_named_with_its_place():
    with pytest.raises(InvalidTypeError, match=r"Received: object at x.a\[1\]"):
        encode({"a": [1, object()]}, {}, "x")
    with pytest.raises(InvalidTypeError, match="Received: object at x"):
        encode(np.asarray(object()), {}, "x")
    with pytest.raises(InvalidTypeError, match="Received: ndarray at x"):
        encode(np.asarray([{}, {}]), {}, "x")


def test_random_states_repeat_what_is_drawn():
    state = through(RandomState().get_state())
    first = random.random(), np.random.rand(), np.random.permutation(5).tolist()
    RandomState().set_state(state)
    assert (random.random(), np.random.rand(), np.random.permutation(5).tolist()) == first
