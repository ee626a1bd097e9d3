"""What a `layout_map` says of variables, without devices."""

import types

import keras
import pytest

import unisono
from unisono.model_parallel._layout_rules import check_axes, of_evaluator, rule_of


def variable(path, *shape):
    return types.SimpleNamespace(path=path, shape=shape)


def test_a_pattern_matches_a_whole_path():
    rule = rule_of({"dense.*kernel": (None, "model"), "dense_1/bias": ("model",)}, 2)
    assert rule(variable("dense_1/kernel", 4, 4)) == (None, "model")
    assert rule(variable("a/dense_1/kernel", 4, 4)) is None
    assert rule.unused() == ["dense_1/bias"]
    assert rule(variable("dense_1/bias", 4)) == ("model",)
    assert rule.unused() == []


def test_a_path_itself_is_a_key():
    """As in Keras, also where a pattern matches it, too."""
    rule = rule_of({"dense.*": ("model",), "dense/bias": (None,)}, 2)
    assert rule(variable("dense/bias", 4)) == (None,)


def test_tensor_layouts_and_functions():
    layout = keras.distribution.TensorLayout((None, "model"))
    assert rule_of({"a": layout}, 2)(variable("a", 4, 4)) == (None, "model")
    assert rule_of(lambda v: ["model"] if v.path == "a" else None, 2)(variable("a", 4)) == ("model",)
    assert rule_of(lambda v: None, 2)(variable("a", 4)) is None


@pytest.mark.parametrize("layout_map", ["model", 3, ["model"]])
def test_other_types_are_errors(layout_map):
    with pytest.raises(unisono.InvalidTypeError, match=r"must be a `keras\.distribution\.LayoutMap`"):
        rule_of(layout_map, 2)


def test_a_layout_is_a_tuple():
    with pytest.raises(unisono.InvalidTypeError, match=r"Received: 'model' for 'a'"):
        rule_of({"a": "model"}, 2)(variable("a", 4))


def test_axes_are_checked():
    check_axes((None, "model"), variable("a", 3, 4), 2)
    with pytest.raises(unisono.InvalidArgumentError, match="whose axis 0 has 3 elements"):
        check_axes(("model", None), variable("a", 3, 4), 2)


def test_an_evaluator_has_as_many_devices_a_replica_as_divide():
    layout_map = {"a": (None, "model")}
    assert of_evaluator(4, 2, layout_map) == (2, layout_map)
    assert of_evaluator(4, 8, "auto") == (4, "auto")
    assert of_evaluator(6, 4, None) == (2, None)
    # As replicas of one device are made.
    assert of_evaluator(1, 2, layout_map) == of_evaluator(3, 2, "auto") == (1, None)
    # What is wrong is said where replicas are made.
    assert of_evaluator(1, "two", layout_map) == ("two", layout_map)
    size, rule = of_evaluator(2, 4, layout_map)
    assert size == 2
    assert rule_of(rule, 2)(variable("a", 4, 8)) == (None, "model")
