"""`HParams`."""

import copy

import pytest

from unisono import InvalidArgumentError
from unisono.estimator import HParams


def test_values_keep_their_types():
    params = HParams(rate=0.1, steps=10, name="a", units=[8, 4], fast=True, free=None)
    params.parse("rate=1,steps=20, name=b c,units=[1,2,3],units[1]=7,fast=false,free=x")
    assert params.values() == {
        "rate": 1.0, "steps": 20, "name": "b c", "units": [1, 7, 3], "fast": False, "free": "x",
    }  # fmt: skip
    assert isinstance(params.rate, float)
    params.override_from_dict({"rate": 2, "steps": 3.0})
    assert (params.rate, params.steps, type(params.steps)) == (2.0, 3, int)
    assert HParams(rate=0.0).parse_json('{"rate": 0.5}').to_json() == '{"rate": 0.5}'
    assert params.get("absent", 3) == 3
    assert "units" in params
    assert copy.deepcopy(params).values() == params.values()
    params.del_hparam("free")
    assert "free" not in params
    assert repr(HParams(a=1)) == "HParams(a=1)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps=1.5", "Could not parse"),
        ("rate=fast", "Could not parse"),
        ("absent=1", "Unknown hyperparameter"),
        ("units=3", "Must pass a list"),
        ("rate=[1,2]", "Must not pass a list"),
        ("units[4]=1", "An index"),
        ("fast=2", "A bool"),
        ("=1", "Malformed"),
    ],
)
def test_what_cannot_be_read(text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        HParams(rate=0.1, steps=10, units=[8], fast=True).parse(text)


@pytest.mark.parametrize(
    "make",
    [
        lambda: HParams(units=[]),
        lambda: HParams(values=1),
        lambda: HParams(a=1).add_hparam("a", 2),
        lambda: HParams(a=1).set_hparam("a", 1.5),
        lambda: HParams(a=1).set_hparam("a", True),
        lambda: HParams(a="x").set_hparam("a", 1),
    ],
)
def test_what_cannot_be_set(make):
    with pytest.raises(InvalidArgumentError):
        make()
