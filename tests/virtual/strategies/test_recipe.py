"""The strategy of docs/architecture.md's recipe trains like one device, with `fit` and with `run`."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest

import unisono

DOCUMENT = Path(__file__).parents[3] / "docs" / "architecture.md"


@pytest.fixture(scope="module")
def strategy():
    section = DOCUMENT.read_text().partition("## Add a strategy")[2].partition("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names = {}
    exec(program, names)
    return names["EveryOtherDeviceStrategy"]()


def data():
    x = np.random.default_rng(0).normal(size=(30, 3)).astype("f4")
    return x, x.sum(1, keepdims=True)


def model(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        net.compile(keras.optimizers.Adam(0.1), "mse")
    return net


def test_fit(strategy):
    assert strategy.num_replicas_in_sync == 4
    losses = [
        model(each).fit(*data(), batch_size=7, epochs=3, verbose=0).history["loss"]
        for each in (strategy, unisono.OneDeviceStrategy("cpu:0"))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


def test_run(strategy):
    results = []
    for each in (strategy, unisono.OneDeviceStrategy("cpu:0")):
        net = model(each)
        loss_fn = keras.losses.MeanSquaredError()

        def step(batch, net=net, loss_fn=loss_fn):
            x, y = batch
            with unisono.GradientTape() as tape:
                loss = loss_fn(y, net(x, training=True))
            net.optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
            return loss

        batches = each.distribute_dataset([data()] * 5)
        results.append([float(each.reduce("sum", each.run(step, args=(b,)), axis=None)) for b in batches])
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    assert results[0][-1] < results[0][0]
