"""Random numbers of `tf.random` in compiled steps: new ones in each, and the same again from a seed."""

import contextlib

import numpy as np
import pytest

from tests.virtual.training.stateful._models import rows
from unisono import tf
from unisono.checkpoint._rng_state import RandomState
from unisono.step.variables import _seeds


class Draws(tf.keras.Model):
    def train_step(self, data):
        return {"drawn": tf.reduce_sum(tf.random.normal(tf.shape(data)) + tf.random.uniform((1,)))}


def drawn(model, count=3):
    return [model.train_on_batch(rows(2)[0], return_dict=True)["drawn"] for _ in range(count)]


def made():
    model = Draws()
    model.compile()
    return model


def test_each_step_draws_new_numbers_and_a_seed_repeats_them():
    tf.random.set_seed(7)
    model = made()
    first = drawn(model)
    assert len(set(first)) == 3
    tf.random.set_seed(7)
    # The program that is compiled already, and another one.
    assert drawn(model) == first
    tf.random.set_seed(7)
    assert drawn(made()) == first
    tf.random.set_seed(8)
    assert drawn(model)[0] != first[0]


def test_a_checkpoint_of_the_random_state_holds_theirs():
    tf.random.set_seed(7)
    model = made()
    drawn(model, 1)
    state = RandomState().get_state()
    np.testing.assert_array_equal(state["steps"].shape, (2,))
    expected = drawn(model)
    RandomState().set_state(state)
    assert drawn(model) == expected


def test_a_seed_starts_no_generator(monkeypatch):
    """Programs set seeds before they make virtual devices, which JAX allows before it starts."""
    monkeypatch.setattr(_seeds, "_GENERATORS", [])
    tf.random.set_seed(11)
    assert _seeds.step_state() is None
    draw = tf.function(lambda: tf.random.normal([2]))
    first = draw()
    tf.random.set_seed(11)
    np.testing.assert_array_equal(draw(), first)
    assert (draw() != first).all()


class Noisy(tf.keras.layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


class Net(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.noisy = Noisy()

    def call(self, x):
        return self.noisy(x)


def functional():
    inputs = tf.keras.Input((3,))
    noisy = Noisy()(inputs)
    return tf.keras.Model(inputs, tf.keras.layers.Lambda(lambda x: x * tf.random.uniform((1,)))(noisy))


@pytest.mark.parametrize("make", [Net, functional])
@pytest.mark.parametrize("devices", [0, 2])
def test_layers_draw_without_a_seed(make, devices):
    strategy = tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(devices)]) if devices else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make()
        model.compile("sgd", "mse")
    zeros = np.zeros((4, 3))
    first, second = (model.predict(zeros, verbose=0) for _ in range(2))
    assert not np.any(first == second)
    # Each replica draws its own.
    assert not np.any(first[:2] == first[2:])


def test_a_layer_that_names_no_random_operation_has_no_further_state():
    class Plain(tf.keras.layers.Layer):
        def call(self, x):
            return 2 * x

    layer, noisy = Plain(), Noisy()
    layer(np.ones(2))
    assert not layer.variables
    assert not np.array_equal(noisy(np.zeros(2)), noisy(np.zeros(2)))


def test_a_seed_that_is_set_before_the_first_step_is_its_seed(monkeypatch):
    """No generator is made then, as that would start JAX."""
    monkeypatch.setattr(_seeds, "_GENERATORS", [])
    monkeypatch.setattr(_seeds, "_FIRST_SEEDS", [])
    _seeds.set_step_seed(7)
    assert _seeds.step_state() is None
    first = drawn(made())
    tf.random.set_seed(7)
    assert drawn(made()) == first
