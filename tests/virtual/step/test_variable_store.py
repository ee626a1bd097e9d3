"""Variables that code which runs again gets from its first run."""

import keras
import numpy as np
import pytest

import unisono
from unisono.step.variables._variable_store import VariablesByPath, current_store


@pytest.fixture(autouse=True)
def _installed():
    unisono.MirroredStrategy(["cpu:0"])


def build(units=3):
    model = keras.Sequential([keras.layers.Dense(units), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.build((None, 2))
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(model.trainable_variables)
    return model, optimizer, keras.metrics.Mean(name="m")


def test_a_second_run_gets_the_variables_of_the_first():
    store = VariablesByPath()
    with store.entered():
        model, optimizer, metric = build()
        assert current_store() is store
    assert current_store() is None
    paths = list(store.variables)
    assert {"sequential/dense/kernel", "sequential/dense_1/bias", "adam/iteration", "m/total"} <= set(paths)
    before = keras.layers.Dense(1).name
    store.is_closed = True
    with store.entered():
        again, other, total = build()
    assert [*again.weights, *other.variables, *total.variables] == [
        *model.weights, *optimizer.variables, *metric.variables
    ]  # fmt: skip
    assert all(a is b for a, b in zip(again.weights, model.weights, strict=True))
    assert list(store.variables) == paths
    assert float(store.given["adam/learning_rate"]) == np.float32(0.1)
    # The names of other code count on.
    assert keras.layers.Dense(1).name != before


def test_variables_of_one_name_are_told_apart():
    store = VariablesByPath()
    for _ in range(2):
        with store.entered():
            first, second = keras.Variable([1.0], name="a"), unisono.Variable([2.0, 3.0], name="a")
            third = unisono.Variable(4.0)
    assert store.variables == {"a": first, "a_1": second, "variable": third}
    assert store.used == [first, second, third]
    assert second.name == "a_1"


def test_frozen_variables_are_not_among_the_trainable_ones():
    store = VariablesByPath()
    for trainable in (True, False, True):
        with store.entered():
            layer = keras.layers.Dense(1, trainable=trainable)
            layer.build((None, 2))
            assert len(store.trainable_variables) == (2 if trainable else 0)


def test_other_variables_in_a_later_run_are_errors():
    store = VariablesByPath()
    with store.entered():
        build(3)
    with (
        pytest.raises(ValueError, match=r"sequential/dense/kernel.*shape \(2, 4\), which was \(2, 3\)"),
        store.entered(),
    ):
        build(4)
    with store.entered():
        keras.Variable(1.0, name="a")
    with pytest.raises(ValueError, match="'a' as a Variable"), store.entered():
        unisono.Variable(1.0, name="a")
    store.is_closed = True
    with pytest.raises(unisono.ContextError, match="'extra'"), store.entered():
        keras.Variable(1.0, name="extra")


def test_a_run_within_a_run_leaves_the_outer_one_as_it_was():
    store = VariablesByPath()
    with store.entered():
        first = keras.Variable(1.0)
        with store.entered():
            assert keras.Variable(1.0) is first
            assert first.trainable
        second = keras.Variable(2.0)
        assert store.used == [first, second]


def test_an_optimizer_can_be_made_inside_a_step():
    store = VariablesByPath()

    @unisono.function
    def step():
        with store.entered():
            optimizer = keras.optimizers.SGD(0.5)
            return optimizer.iterations.assign_add(1), optimizer.learning_rate + 0

    assert [int(step()[0]) for _ in range(3)] == [1, 2, 3]
    assert float(step()[1]) == 0.5
    assert step.num_programs == 1
