"""Python values and flags that change between steps of `run`, which a step in eager code would see."""

import logging

import keras
import numpy as np

import unisono
from tests.virtual.training._digits import mirrored


class _Loop:
    """A loop of one's own, which changes an attribute between steps."""

    def __init__(self):
        self.weight, self.calls = 1.0, 0

    def step(self, x):
        self.calls += 1
        return _scaled(x) * self.weight


_SCALE = {"x": 1.0}


def _scaled(x):
    return x * _SCALE["x"]


def test_a_step_sees_new_values_of_what_it_reads_by_name(monkeypatch):
    strategy, loop = mirrored(2), _Loop()

    def run():
        return strategy.run(loop.step, args=(np.float32(3),)).values[1]

    assert [run(), run()] == [3, 3]
    assert strategy.num_programs == 1  # the count of its calls is the step's own
    loop.weight = 2.0
    assert run() == 6
    monkeypatch.setitem(_SCALE, "x", 5.0)
    assert [run(), run()] == [30, 30]
    loop.weight = 1.0
    monkeypatch.setitem(_SCALE, "x", 1.0)
    assert run() == 3
    assert strategy.num_programs == 3


def test_a_number_that_changes_at_each_step_is_warned_of(caplog):
    strategy, loop = mirrored(2), _Loop()
    with caplog.at_level(logging.WARNING, logger="unisono"):
        for loop.weight in range(10):
            assert strategy.run(loop.step, args=(np.float32(3),)).values[1] == 3 * loop.weight
    (record,) = caplog.records
    assert "step was compiled 8 times" in record.getMessage()
    assert "attributes" in record.getMessage()


def test_a_function_keeps_the_values_of_its_trace():
    strategy, loop = mirrored(2), _Loop()

    @unisono.function
    def steps(x):
        return strategy.reduce("SUM", strategy.run(loop.step, args=(x,)), axis=None)

    assert float(steps(np.float32(3))) == 6
    loop.weight = 2.0
    assert float(steps(np.float32(3))) == 6


class _Pair:
    """Two layers after each other, trained by a step that takes what is trainable."""

    def __init__(self, strategy):
        with strategy.scope():
            self.first, self.second = keras.layers.Dense(1), keras.layers.Dense(1)
            self.second.build(self.first.compute_output_shape((None, 1)))
            self.first.build((None, 1))
            self.optimizer = keras.optimizers.SGD(0.1)
        self.strategy = strategy

    def step(self, x):
        with unisono.GradientTape() as tape:
            loss = keras.ops.mean(self.second(self.first(x)) ** 2)
        variables = self.first.trainable_variables + self.second.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    def step_that_freezes(self, x):
        self.first.trainable, self.second.trainable = False, True
        self.step(x)
        self.first.trainable = True

    def changes(self, step):
        """Run a step, and return whether each layer has changed."""
        before = [layer.get_weights()[0] for layer in (self.first, self.second)]
        self.strategy.run(step, args=(np.ones((2, 1), "f4"),))
        after = [layer.get_weights()[0] for layer in (self.first, self.second)]
        return [bool(x != y) for x, y in zip(before, after, strict=True)]


def test_a_layer_that_is_frozen_between_steps_does_not_change():
    pair = _Pair(mirrored(2))
    assert pair.changes(pair.step) == [True, True]
    for _ in range(2):  # the programs of both phases are kept
        pair.first.trainable = False
        assert pair.changes(pair.step) == [False, True]
        pair.first.trainable = True
        assert pair.changes(pair.step) == [True, True]
    assert pair.strategy.num_programs == 2


def test_flags_of_layers_without_variables_to_train_count():
    """BatchNormalization that is frozen takes its moving statistics."""
    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.layers.BatchNormalization(center=False, scale=False)])
        model.build((None, 1))
    x = np.arange(4, dtype="f4")[:, None]

    def run():
        strategy.run(lambda x: model(x, training=True), args=(x,))
        return float(model.layers[0].moving_mean[0])

    first = run()
    model.layers[0].trainable = False
    assert run() == first > 0
    model.layers[0].trainable = True
    assert run() > first


def test_a_model_that_is_frozen_trains_no_layer_that_is_not():
    pair = _Pair(mirrored(2))
    model = keras.Sequential([pair.first, pair.second])

    def step(x):
        with unisono.GradientTape() as tape:
            loss = keras.ops.mean(model(x) ** 2)
        for variable, gradient in zip(
            model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True
        ):
            variable.assign_sub(0.1 * gradient)

    assert pair.changes(step) == [True, True]
    model.trainable = False
    pair.first.trainable = pair.second.trainable = True
    assert pair.changes(step) == [False, False]


def test_settings_of_keras_objects_count():
    """A rate of a layer, a limit of gradients, a schedule in place of a number."""
    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.layers.LeakyReLU(0.5)])
        weight, optimizer = keras.Variable(0.0), keras.optimizers.SGD(0.5)

    def output():
        return float(strategy.run(lambda x: model(x), args=(np.full((2, 1), -1, "f4"),)).values[0][0, 0])

    def descent():
        before = float(weight.value)
        strategy.run(lambda: optimizer.apply_gradients([(keras.ops.ones(()), weight)]))
        return before - float(weight.value)

    assert [output(), descent()] == [-0.5, 1.0]
    model.layers[0].negative_slope = 0.25
    assert output() == -0.25
    optimizer.clipnorm = 0.5
    assert descent() == 0.25
    optimizer.learning_rate = keras.optimizers.schedules.PiecewiseConstantDecay([10], [0.25, 0.0])
    assert descent() == 0.125


def test_flags_that_a_step_sets_itself_need_no_further_program():
    pair = _Pair(mirrored(2))
    for _ in range(4):
        pair.first.trainable = False
        assert pair.changes(pair.step_that_freezes) == [False, True]
    assert pair.strategy.num_programs <= 2
