"""Losses that users write: nothing of them is copied, serialized or made anew.

`copy.copy` of a Keras object goes through its config: it fails for what is not registered, and loses
every argument that `get_config` leaves out.
"""

import contextlib

import keras
import numpy as np
import pytest

import unisono
from tests.virtual.training._digits import WEIGHTS, digits, mirrored
from unisono.training.groups._batch_policy import Mode

L = keras.layers
ops = keras.ops


def squares(y, p):
    return ops.mean(ops.square(y - p), axis=-1)


class Unregistered(keras.Loss):
    """Holds what no config can hold, and no argument that `from_config` could pass."""

    def __init__(self, function):
        super().__init__()
        self._function = function

    def call(self, y, p):
        return self._function(y, p)

    def get_config(self):
        raise NotImplementedError


@keras.saving.register_keras_serializable("tests")
class Forgetful(keras.Loss):
    """Registered, with an argument that its config leaves out."""

    def __init__(self, weight=1.0, name="forgetful"):
        super().__init__(name=name)
        self.weight = weight

    def call(self, y, p):
        return self.weight * squares(y, p)


class Counting(Forgetful):
    """Keeps state while it is traced."""

    calls = 0

    def call(self, y, p):
        self.calls += 1
        return super().call(y, p)


def local_class():
    class Local(keras.Loss):
        def call(self, y, p):
            return ops.abs(y - p)

    return Local(reduction="sum")


LOSSES = {
    "function": lambda: squares,
    "lambda": lambda: lambda y, p: ops.sum(ops.abs(y - p), axis=-1),
    "scalar function": lambda: lambda y, p: ops.mean(ops.square(y - p)),
    "unregistered class": lambda: Unregistered(squares),
    "local class": local_class,
    "forgotten argument": lambda: Forgetful(weight=5.0),
    "bound method": lambda: Forgetful(weight=3.0).call,
    "mean with sample weight": lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    "loss of losses": lambda: Unregistered(lambda y, p: Forgetful(2.0)(y, p) + squares(y, p)),
}

#: Losses with a part that is one number for all rows.
SCALARS = ("scalar function", "loss of losses")
BY_ROWS = [name for name, make in LOSSES.items() if isinstance(make(), keras.Loss) and name not in SCALARS]


def data(rows=22):
    x, y = digits()
    return x[:rows], y[:rows, None] / 10


def fitted(name, replicas, batch_size):
    keras.utils.set_random_seed(1)
    strategy = mirrored(replicas) if replicas else unisono.get_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), L.Dense(3, activation="tanh"), L.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), LOSSES[name]())
    x, y = data()
    # A mean over rows that the user takes leaves nothing for weights of rows to weight.
    weights = (
        None if name in ("scalar function", "loss of losses") else np.linspace(0.5, 2, len(x), dtype="f4")
    )
    options = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, sample_weight=weights, **options)
    return [*history.history["loss"], *model.get_weights()]


@pytest.mark.parametrize("name", LOSSES)
def test_fit(name):
    """22 rows on two replicas: batches of 8 divide and end with one of 6; of 7 they do not."""
    for batch_size in (8, 7):
        expected = fitted(name, 0, batch_size)
        found = fitted(name, 2, batch_size)
        for a, b in zip(expected, found, strict=True):
            # float32 sums in another order.
            np.testing.assert_allclose(b, a, **WEIGHTS)


@pytest.mark.parametrize("name", BY_ROWS)
def test_run(name):
    """In a custom loop, with parts of 4 and 3 rows."""
    x, y = data(7)
    loss = LOSSES[name]()
    strategy = mirrored(2)
    batch = next(iter(strategy.distribute_dataset([(x[:, :1], y)])))
    share = strategy.run(lambda x, y: loss(y, x), args=batch)
    total = strategy.reduce("SUM", share, axis=None)
    np.testing.assert_allclose(np.asarray(total), np.asarray(loss(y, x[:, :1])), rtol=1e-5)


def test_state_of_a_loss_is_its_own():
    """What a loss notes about itself while it is traced stays."""
    loss = Counting(weight=2.0)
    strategy = mirrored(2)
    x, y = data(4)
    strategy.run(lambda x, y: loss(y, x), args=next(iter(strategy.distribute_dataset([(x[:, :1], y)]))))
    assert loss.calls > 0
    assert loss.reduction == "sum_over_batch_size"


def test_reduction_comes_back_after_an_error():
    def fails(y, p):
        raise ArithmeticError("on purpose")

    loss = Unregistered(fails)
    strategy = mirrored(2)
    batch = next(iter(strategy.distribute_dataset([(np.zeros((4, 1), "f4"), np.zeros((4, 1), "f4"))])))
    with pytest.raises(ArithmeticError, match="on purpose"):
        strategy.run(lambda x, y: loss(y, x), args=batch)
    assert loss.reduction == "sum_over_batch_size"


class OwnLoss(keras.Model):
    """A model that computes its loss itself, from the rows' squared errors."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.total(keras.ops.square(y_pred - y))


def own_loss(total):
    inputs = keras.Input((3,))
    model = OwnLoss(inputs, keras.layers.Dense(1)(inputs))
    model.total = total
    model.compile("sgd")
    return model


@pytest.mark.parametrize(
    ("total", "mode"),
    [
        (keras.ops.mean, Mode.SPLIT),
        (keras.ops.sum, Mode.JOINED),
        (lambda e: keras.ops.sqrt(keras.ops.mean(e)), Mode.JOINED),
    ],
    ids=["mean", "sum", "root"],
)
def test_a_compute_loss_is_that_of_one_device(total, mode, caplog):
    x, y = np.random.default_rng(0).normal(size=(8, 3)).astype("f4"), np.ones((8, 1), "f4")
    results = []
    for scope in contextlib.nullcontext(), unisono.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        keras.utils.set_random_seed(0)
        with scope:
            model = own_loss(total)
        history = model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history["loss"]
        results.append([*history, *model.get_weights()])
    for one, two in zip(*results, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-5)
    assert {key.mode for key in model.train_function._programs} == {mode}
    assert caplog.text.count("compute_loss relates rows") == (mode is Mode.JOINED)
