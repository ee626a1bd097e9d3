"""Variables that begin with a ready value, and those that a step makes: in parts from the beginning on."""

import gc

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.support import devices
from tests.virtual.strategies.test_replica_grid import assert_close, grid

pytestmark = pytest.mark.numbers

WIDTH, HIDDEN = 48, 192

MAP = {"of_mine": (None, "model"), ".*down/kernel": ("model", None)}


class OfMine(keras.layers.Layer):
    """A layer whose weight is given, and not made by an initializer."""

    def __init__(self):
        super().__init__()
        values = np.random.default_rng(0).normal(size=(WIDTH, HIDDEN)) / 10
        self.kernel = keras.Variable(values.astype("float32"), name="of_mine")

    def call(self, x):
        return keras.ops.relu(x @ self.kernel)


def made(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [OfMine(), keras.layers.Dense(WIDTH, use_bias=False, name="down")]
        return keras.Sequential([keras.Input((WIDTH,)), *layers]), keras.optimizers.Adam(0.01)


def run(strategy, model, optimizer, batches=3):
    """Train in a loop whose first step builds the optimizer."""

    def step(x):
        with unisono.GradientTape() as tape:
            errors = keras.ops.mean((model(x, training=True) - x) ** 2, axis=-1)
            loss = unisono.nn.compute_average_loss(errors)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    x = np.random.default_rng(1).normal(size=(batches, 8, WIDTH)).astype("float32")
    losses = [strategy.run(step, (rows,)) for rows in strategy.distribute_dataset(list(x))]
    return [np.asarray(strategy.reduce("SUM", loss, axis=None)) for loss in losses]


def largest_part(known):
    """The number of elements of the largest part that a device has of an array which was not there before."""
    gc.collect()
    known = set(map(id, known))
    parts = [s.data.size for x in jax.live_arrays() if id(x) not in known for s in x.addressable_shards]
    return max(parts, default=0)


@pytest.fixture(scope="module")
def wanted():
    strategy = unisono.OneDeviceStrategy(devices(1)[0])
    model, optimizer = made(strategy)
    losses = run(strategy, model, optimizer)
    return [*losses, *map(np.asarray, [*model.variables, *optimizer.variables])]


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, 2),
        ({"layout_map": "auto"}, 2),
        ({"state_layout": "sharded"}, 2),
        ({"state_layout": "fully_sharded"}, 4),
        pytest.param({"layout_map": "auto", "state_layout": "sharded"}, 2, marks=pytest.mark.exhaustive),
        pytest.param(
            {"layout_map": "auto", "state_layout": "fully_sharded"}, 4, marks=pytest.mark.exhaustive
        ),
        pytest.param(
            {"cross_device_ops": unisono.CompressedAllReduce("bfloat16")},
            2,
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_given_weights_and_slots_of_the_first_run_are_never_whole(wanted, options, share):
    known = jax.live_arrays()
    strategy = grid(2, 2, **{"layout_map": MAP, **options})
    model, optimizer = made(strategy)
    # Until the axes follow from a program, a replica's devices share it along any of them.
    assert largest_part(known) <= WIDTH * HIDDEN // (2 if "layout_map" in options else share)
    losses = run(strategy, model, optimizer)
    assert largest_part(known) == WIDTH * HIDDEN // share
    found = [*losses, *map(np.asarray, [*model.variables, *optimizer.variables][: len(wanted) - len(losses)])]
    if "cross_device_ops" not in options:
        assert_close(found, wanted)


def test_a_given_weight_may_be_assigned_and_is_named_by_a_pattern(caplog):
    strategy = grid(2, 2, {"of_mine": (None, "model")})
    model, _ = made(strategy)
    kernel = model.layers[0].kernel
    kernel.assign(np.full((WIDTH, HIDDEN), 2, "float32"))
    assert {s.data.shape for s in kernel.value.addressable_shards} == {(WIDTH, HIDDEN // 2)}
    model.predict(np.ones((8, WIDTH), "float32"), verbose=0)
    assert not [r for r in caplog.records if "matches no variable" in r.getMessage()]
