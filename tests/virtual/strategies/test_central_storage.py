"""Variables that rest in host memory can be used by whoever reads them."""

import keras
import numpy as np
import pytest

import unisono
from tests.virtual.training._digits import crossentropy, digits
from unisono.checkpoint import Checkpoint

L = keras.layers


def made(strategy, dtype=None):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), L.Dense(16, activation="relu", dtype=dtype), L.Dense(10, dtype=dtype)]
        )
        model.compile("sgd", crossentropy(), metrics=["accuracy"])
    return model


USES = {
    "fit": lambda m, x, y: m.fit(x, y, batch_size=20, shuffle=False, verbose=0).history["loss"],
    "evaluate": lambda m, x, y: m.evaluate(x, y, batch_size=20, verbose=0),
    "predict": lambda m, x, y: m.predict(x, batch_size=20, verbose=0),
    "call": lambda m, x, y: m(x),
    "train_on_batch": lambda m, x, y: m.train_on_batch(x, y),
}


@pytest.mark.parametrize(
    "order",
    [
        ("predict", "evaluate", "call"),
        ("predict", "fit", "call", "evaluate"),
        ("predict", "train_on_batch", "train_on_batch", "predict"),
    ],
)
def test_a_model_in_host_memory_can_be_used_in_any_order(order):
    """`predict` builds no metrics: what came next traced layers with weights in host memory."""
    x, y = (a[:40] for a in digits())
    model = made(unisono.CentralStorageStrategy(["cpu:0", "cpu:1"], "host"))
    expected = made(unisono.OneDeviceStrategy("cpu:0"))
    for use in order:
        found = USES[use](model, x, y)
        np.testing.assert_allclose(found, USES[use](expected, x, y), rtol=1e-4, atol=1e-5)
        kept = {v._value.sharding.memory_kind for v in model.weights}
        assert kept == {"pinned_host"}, f"after {use}"


def test_variables_in_host_memory_are_read_on_the_device(tmp_path):
    x, y = (a[:40] for a in digits())
    model = made(unisono.CentralStorageStrategy(["cpu:0", "cpu:1"], "host"), dtype="mixed_bfloat16")
    model.fit(x, y, batch_size=20, verbose=0)
    kernel = model.layers[-1].kernel
    assert kernel.value.sharding.memory_kind == "device"
    assert float(keras.ops.sum(kernel * 2)) == pytest.approx(2 * kernel.numpy().sum(), rel=1e-4)
    assert model(x).dtype == "bfloat16"
    path = Checkpoint(model=model).save(tmp_path / "c")
    again = made(unisono.OneDeviceStrategy("cpu:0"), dtype="mixed_bfloat16")
    Checkpoint(model=again).restore(path)
    np.testing.assert_array_equal(again.layers[-1].kernel.numpy(), kernel.numpy())
