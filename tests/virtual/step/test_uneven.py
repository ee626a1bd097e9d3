"""Replicas of unequal size are seen as they are, and their collectives match."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unisono
from tests.support import count_compiles

L = keras.layers


@pytest.fixture(scope="module")
def two():
    return unisono.MirroredStrategy(["cpu:0", "cpu:1"])


def batch_of(strategy, *arrays):
    (batch,) = strategy.distribute_dataset([arrays])
    return batch


@pytest.mark.parametrize(("rows", "parts"), [(5, [3, 2]), (1, [1, 0])])
def test_shapes_and_collectives(two, rows, parts):
    def step(x):
        replica = unisono.get_replica_context()
        joined = replica.all_gather(x, 0)
        total = replica.all_reduce("SUM", jnp.sum(x))
        seen = replica.merge_call(lambda s, y: s.reduce("MEAN", y, axis=0), args=(x,))
        return x.shape[0], total, joined, seen

    x = np.arange(rows, dtype="f4")
    sizes, total, joined, mean = two.run(step, args=batch_of(two, x))
    assert [int(s) for s in two.local_results(sizes)] == parts
    assert [float(t) for t in two.local_results(total)] == [x.sum()] * 2
    assert [j.tolist() for j in two.local_results(joined)] == [x.tolist()] * 2
    assert [float(m) for m in two.local_results(mean)] == [x.mean()] * 2


def one_step(strategy, x, y):
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), L.Dense(4), L.BatchNormalization(synchronized=True, momentum=0.5), L.Dense(1)]
        )
        optimizer = keras.optimizers.SGD(0.1)
        loss_fn = keras.losses.MeanSquaredError()

    def step(x, y):
        with unisono.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    for _ in range(2):
        loss = strategy.run(step, args=batch_of(strategy, x, y))
    return float(strategy.reduce("SUM", loss, axis=None)), model.get_weights()


#: The rows of replicas: 3 and 2; 3 each; 2, 1, 1, 1; and 2, 2, 1, 1 as a further case.
SIZES = [(2, 5), (2, 6), (4, 5), pytest.param(4, 6, marks=pytest.mark.exhaustive)]
SIZES += [pytest.param(3, rows, marks=pytest.mark.exhaustive) for rows in (5, 6)]


@pytest.mark.parametrize(("replicas", "rows"), SIZES)
def test_gradients_flow_through_collectives(replicas, rows):
    """A synchronized BatchNormalization: its statistics, and their derivative, are of all rows."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 3)).astype("f4"), rng.normal(size=(rows, 1)).astype("f4")
    with unisono.MirroredStrategy(["cpu:0"]).scope():
        pass  # so that `synchronized` is understood on one device too
    expected = one_step(unisono.get_strategy(), x, y)
    strategy = unisono.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    loss, weights = one_step(strategy, x, y)
    assert loss == pytest.approx(expected[0], rel=1e-5)
    for a, b in zip(weights, expected[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_one_more_program_only(two):
    def step(x):
        return jnp.sum(x)

    rows = [np.ones(n, "f4") for n in (4, 4, 3)] * 2
    batches = list(two.distribute_dataset(rows))
    with count_compiles() as compiled:
        for batch in batches:
            two.run(step, args=(batch,))
    assert len(compiled) == 2


def test_replicas_that_part_ways_are_an_error(two):
    def step(x):
        if x.shape[0] == 2:
            unisono.get_replica_context().all_reduce("SUM", jnp.sum(x))

    with pytest.raises(unisono.ContextError, match="same collectives in the same order"):
        two.run(step, args=batch_of(two, np.ones(3, "f4")))
