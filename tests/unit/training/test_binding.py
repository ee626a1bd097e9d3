"""Who owns a model or a variable."""

import keras
import pytest

import unisono
from unisono.training import _binding as binding


@pytest.fixture(scope="module")
def strategy():
    return unisono.MirroredStrategy(["cpu:0", "cpu:1"])


def small_model():
    return keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])


def test_the_scope_of_creation_holds_a_model_and_its_variables(strategy):
    with strategy.scope():
        assert binding.current_strategy() is strategy
        model = small_model()
    assert binding.current_strategy() is None
    assert binding.holder_of(model) is strategy
    assert all(binding.holder_of(v) is strategy for v in model.variables)
    assert binding.strategy_of(model) is None  # not compiled yet
    assert binding.holder_by_scope(model) is strategy
    binding.check_variables(model, strategy)


def test_without_a_scope_nobody_holds_a_model(strategy):
    model = small_model()
    assert binding.holder_of(model) is binding.holder_by_scope(model) is None
    assert binding.writes_files(model)
    with pytest.raises(unisono.ScopeError, match="created outside of the scope"):
        binding.check_variables(model, strategy)


def test_compile_binds_and_a_strategy_can_be_taken_away(strategy):
    with strategy.scope():
        model = small_model()
    model.compile("sgd", "mse")
    assert binding.strategy_of(model) is strategy
    assert binding.writes_files(model)
    binding.bind(model, None)
    assert binding.strategy_of(model) is None


def test_a_model_of_two_strategies_is_named(strategy):
    other = unisono.MirroredStrategy(["cpu:2", "cpu:3"])
    with strategy.scope():
        first = keras.layers.Dense(2)
        first.build((None, 2))
    with other.scope():
        second = keras.layers.Dense(2)
        second.build((None, 2))
    model = keras.Sequential([first, second], name="of_two")
    with pytest.raises(unisono.MixedStrategyError, match=r"scope of one strategy. Received: 'of_two'"):
        binding.holder_by_scope(model)
    with other.scope(), pytest.raises(unisono.MixedStrategyError, match="that holds its variables"):
        binding.check_variables(model, other)


def test_a_chief_alone_writes(strategy, monkeypatch):
    with strategy.scope():
        model = small_model()
    monkeypatch.setattr(type(strategy), "is_chief", property(lambda self: False))
    assert not binding.writes_files(model)
