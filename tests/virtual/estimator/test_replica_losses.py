"""Losses of replicas are parts of the loss that one device computes of all rows."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unisono
from unisono._context import Context, current, entered
from unisono.estimator import losses

R = losses.Reduction
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def two():
    return unisono.MirroredStrategy(["cpu:0", "cpu:1"])


LOSSES = {
    "mean": lambda y, p, w: losses.mean_squared_error(y, p),
    "number": lambda y, p, w: losses.mean_squared_error(y, p, 2.0),
    "zero": lambda y, p, w: losses.mean_squared_error(y, p, 0.0),
    "nonzero": lambda y, p, w: losses.mean_squared_error(y, p, w[:, None]),
    "weighted": lambda y, p, w: losses.absolute_difference(y, p, w[:, None], reduction=R.MEAN),
    "batch": lambda y, p, w: losses.huber_loss(y, p, w[:, None], reduction=R.SUM_OVER_BATCH_SIZE),
    "sum": lambda y, p, w: losses.huber_loss(y, p, w[:, None], reduction=R.SUM),
    "pairs": lambda y, p, w: losses.mean_pairwise_squared_error(y, p, w[:, None]),
    "softmax": lambda y, p, w: losses.softmax_cross_entropy(jax.nn.softmax(y), p, w),
}


@pytest.mark.parametrize("means", [False, True])
@pytest.mark.parametrize("rows", [4, 5, 1])
def test_replicas_add_up_to_one_device(two, rows, means):
    y, p = RNG.normal(size=(2, rows, 3)).astype("f4")
    w = np.array([0.5, 0.0, 2.0, 0.0, 3.0], "f4")[:rows]

    def step(batch):
        y, p, w = batch
        context = current()
        with entered(Context(context.strategy, context.replica, means=means)):
            return {name: loss(y, p, w) for name, loss in LOSSES.items()}

    (batch,) = two.distribute_dataset([(y, p, w)])
    found = two.run(step, args=(batch,))
    for name, loss in LOSSES.items():
        total = two.reduce("MEAN" if means else "SUM", found[name], axis=None)
        np.testing.assert_allclose(total, loss(y, p, w), rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("rows", [4, 5, 1])
def test_gradients_are_those_of_one_device(two, rows):
    x, y = RNG.normal(size=(2, rows, 3)).astype("f4")
    w = np.array([0.5, 0.0, 2.0, 0.0, 3.0], "f4")[:rows]
    start = RNG.normal(size=(3, 3)).astype("f4")

    def loss(weights, x, y, w):
        return losses.mean_squared_error(y, x @ weights, w[:, None])

    with two.scope():
        weights = keras.Variable(start)
        optimizer = keras.optimizers.SGD(1.0)

    def step(batch):
        x, y, w = batch
        with unisono.GradientTape() as tape:
            value = loss(weights.value, x, y, w)
        optimizer.apply_gradients([(tape.gradient(value, weights), weights)])

    (batch,) = two.distribute_dataset([(x, y, w)])
    two.run(step, args=(batch,))
    wanted = start - jax.grad(loss)(start, x, y, w)
    np.testing.assert_allclose(weights.value, wanted, rtol=1e-5, atol=1e-6)


def test_scalar_elements(two):
    """A replica's element may be one number, as in the first program of TensorFlow's guide."""

    def step(x):
        return losses.mean_squared_error(labels=jnp.float32(1), predictions=jnp.reshape(x, []))

    (batch,) = two.distribute_dataset([np.array([3.0, 1.0], "f4")])
    assert float(two.reduce("SUM", two.run(step, args=(batch,)), axis=None)) == 2.0
