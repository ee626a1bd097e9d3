"""What is compared between workers before `fit`: what does the same is equal, and what does not differs."""

import keras
import numpy as np
import pytest

from unisono.cluster.rendezvous._mismatch import differences
from unisono.cluster.strategy._call_description import (
    call_fingerprint,
    described,
    layers_of,
    optimizer_of,
)

L = keras.layers


def dense(activation="relu", **options):
    return keras.Sequential([keras.Input((4,)), L.Dense(3, activation, **options), L.Dense(1)])


def functional(skips):
    x = keras.Input((4,))
    a = L.Dense(4)(x)
    b = L.Dense(4)(a)
    return keras.Model(x, L.Add()([b, x if skips else a]))


def user_layer(factor):
    class Mine(L.Layer):
        def __init__(self, thing):
            super().__init__()
            self.thing = thing

    if factor == 2:
        Mine.call = lambda self, x: x * 2
    else:
        Mine.call = lambda self, x: x * 3
    return keras.Sequential([keras.Input((4,)), Mine(object()), L.Lambda(lambda x: x + factor)])


def frozen(is_frozen):
    model = dense()
    model.layers[0].trainable = not is_frozen
    return model


class NoConfig(keras.Model):
    def __init__(self, rate):
        super().__init__()
        self.first, self.drop = L.Dense(3), L.Dropout(rate)

    def get_config(self):
        raise NotImplementedError

    def call(self, x):
        return self.drop(self.first(x))


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        (dense, "relu", "tanh"),
        (dense, keras.activations.relu, keras.activations.gelu),
        (lambda rate: NoConfig(rate), 0.1, 0.2),
        (lambda n: dense(kernel_regularizer=keras.regularizers.L2(n)), 0.1, 0.2),
        (functional, True, False),
        (user_layer, 2, 3),
        (frozen, True, False),
        (lambda bins: keras.Sequential([L.Discretization(bin_boundaries=bins)]), [0.0, 1.0], [0.0, 2.0]),
    ],
)
def test_layers(make, one, other):
    first = layers_of(make(one))
    # Made anew, in the same process: Keras counts names up, and objects lie elsewhere.
    assert layers_of(make(one)) == first
    assert layers_of(make(other)) != first
    assert " at 0x" not in first


def test_what_workers_may_have_different():
    one = dense(kernel_initializer=keras.initializers.GlorotUniform(seed=1), name="a")
    other = dense(kernel_initializer=keras.initializers.GlorotUniform(seed=2), name="b")
    assert layers_of(one) == layers_of(other)
    assert layers_of(keras.Sequential([L.Dropout(0.1, seed=1)])) == layers_of(
        keras.Sequential([L.Dropout(0.1, seed=2)])
    )
    assert described({"loss": {"dense_9": "mse"}}, {"dense_9": 0}) == described(
        {"loss": {"dense_12": "mse"}}, {"dense_12": 0}
    )
    assert (
        described("<function f at 0x7f45>")
        == described("<function f at 0x7fa9>")
        != described("<function g>")
    )
    assert described({object(): 1}) == described({object(): 1})
    assert described("/tmp/worker-0/words.txt") == described("/tmp/worker-1/words.txt")


def test_optimizers():
    adam = keras.optimizers.Adam
    assert optimizer_of(adam(0.1)) == optimizer_of(adam(0.2)) != optimizer_of(adam(0.1, beta_1=0.8))
    scaled = keras.optimizers.LossScaleOptimizer
    assert optimizer_of(scaled(adam(0.1))) == optimizer_of(scaled(adam(0.2)))
    assert optimizer_of(scaled(adam(0.1))) != optimizer_of(scaled(adam(0.1, clipnorm=1.0)))
    schedule = keras.optimizers.schedules.ExponentialDecay
    assert optimizer_of(adam(schedule(0.1, 10, 0.9))) != optimizer_of(adam(schedule(0.2, 10, 0.9)))
    assert optimizer_of(None) == "None"


def losses(weight):
    """Ways of users to write a loss; `weight` is in the code or in the configuration."""
    source = f"""
def function(y, p):
    return {weight} * keras.ops.mean(y - p)

class Loss(keras.Loss):
    def call(self, y, p):
        return {weight} * (y - p)
"""
    space = {"keras": keras, "__name__": "__main__"}
    exec(source, space)
    return space["function"], space["Loss"](), keras.losses.Huber(delta=weight), {"a": space["function"]}


def test_losses_of_users():
    for one, same, other in zip(losses(1.0), losses(1.0), losses(2.0), strict=True):
        assert described(one) == described(same) != described(other)


def test_any_value_has_a_description():
    class Odd:
        def __repr__(self):
            raise RuntimeError

        def get_config(self):
            raise RuntimeError

    circular = []
    circular.append(circular)
    values = [
        Odd(),
        Odd,
        circular,
        np.zeros(3),
        np.float32(1),
        print,
        {1: {2, 3}},
        {"x": ...},
        np.dtype("f4"),
    ]
    for value in values:
        assert described(value) == described(value)
        assert " at 0x" not in described(value)
    assert described(np.zeros(3)) != described(np.ones(3))
    many = [str(i) for i in range(10_000)]
    assert len(described(many)) < 3000
    assert described(many) != described([*many[:-1], "other"])


def lambdas(number, folder):
    source = f"lambda one: one * {number} + len({{'a', 'b'}})"
    return eval(compile(source, f"/{folder}/train.py", "eval"))


@pytest.mark.filterwarnings("ignore:.*lambda")
@pytest.mark.parametrize("make", [L.Lambda, lambda f: L.Dense(2, activation=f)])
def test_a_lambda_is_the_same_in_another_folder(make, monkeypatch):
    monkeypatch.setattr("inspect.getsource", lambda obj: "")
    first = described(make(lambdas(2, "home/one")))
    assert described(make(lambdas(2, "mnt/other"))) == first
    assert described(make(lambdas(3, "home/one"))) != first


def two_outputs(weight):
    x = keras.Input((4,))
    model = keras.Model(x, [L.Dense(1)(x), L.Dense(1)(x)])
    first, second = model.output_names  # which Keras counts up
    model.compile(
        "sgd", {first: "mse", second: "mae"}, {first: weight, second: 1.0}, metrics={first: ["mae"]}
    )
    return model


def test_calls_with_names_and_orders_of_their_own():
    first = call_fingerprint(two_outputs(0.5), {"class_weight": {0: 1.0, 1: 2.0}})
    assert call_fingerprint(two_outputs(0.5), {"class_weight": {1: 2.0, 0: 1.0}}) == first
    other = call_fingerprint(two_outputs(0.6), {"class_weight": {0: 1.0, 1: 3.0}})
    assert {k for k in first if first[k] != other[k]} == {"class_weight", "loss_weights"}


def test_switches_of_the_environment_that_choose_programs(monkeypatch):
    """Workers that run other programs would wait for each other's collectives for ever."""
    model = two_outputs(0.5)
    first = call_fingerprint(model, {})
    for name, value in (("UNISONO_STEPS_TOGETHER", "never"), ("UNISONO_RESIDENT_DATA", "1")):
        monkeypatch.setenv(name, value)
    other = call_fingerprint(model, {})
    assert sorted(differences({0: first, 1: first, 2: other})) == [
        f"{name} is 'not set' on processes 0 and 1, but '{value}' on process 2. "
        "Make it the same in every process."
        for name, value in (("UNISONO_RESIDENT_DATA", "1"), ("UNISONO_STEPS_TOGETHER", "never"))
    ]
