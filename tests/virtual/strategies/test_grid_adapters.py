"""Low-rank adapters, frozen parts and whole numbers for weights, on replicas of several devices."""

import keras
import numpy as np
import pytest

import unisono
from tests.support import devices
from unisono.step._keras_internals import stored_value

pytestmark = pytest.mark.numbers

L = keras.layers

#: Sums of parts in another order: some roundings of float32.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}

WIDTH, HIDDEN, CLASSES = 64, 256, 8

UP_AND_DOWN = {
    "net/up/(kernel|lora_kernel_b)": (None, "model"),
    "net/up/bias": ("model",),
    "net/down/(kernel|lora_kernel_a)": ("model", None),
}


def made(strategy, change):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [L.Dense(HIDDEN, activation="tanh", name="up"), L.Dense(WIDTH, name="down")]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, L.Dense(CLASSES, name="head")], name="net")
        change(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, 0.9), loss)
    return model


def strategies(layout_map):
    grid = unisono.MirroredStrategy(devices(4), devices_per_replica=2, layout_map=layout_map)
    return unisono.OneDeviceStrategy(devices(1)[0]), grid


def data():
    random = np.random.default_rng(0)
    return random.normal(size=(22, WIDTH)).astype("float32"), random.integers(0, CLASSES, 22)


def cut_axes(model):
    """By path within the model, the axis of each weight that its devices share."""
    axes = {}
    for variable in model.variables:
        value = stored_value(variable)
        part = value.addressable_shards[0].data.shape
        cut = [i for i, (a, b) in enumerate(zip(part, value.shape, strict=True)) if a < b]
        if cut:
            axes[variable.path.partition("/")[2]] = cut[0]
    return axes


def adapters(model):
    """Adapters of two layers; the others are frozen."""
    model.get_layer("up").enable_lora(4)
    model.get_layer("down").enable_lora(4)
    model.get_layer("head").trainable = False


def frozen(model):
    model.get_layer("up").trainable = False


def whole_numbers(model):
    model.get_layer("up").quantize("int8")
    model.get_layer("down").quantize("int8")


def whole_numbers_with_adapters(model):
    whole_numbers(model)
    adapters(model)


CUT = {"up/kernel": 1, "up/bias": 0, "down/kernel": 0}
AS_FLOATS = {**CUT, "up/lora_kernel_b": 1, "down/lora_kernel_a": 0}

#: By case: what changes the model; the axes that are cut without a map, and with one; tolerances.
CASES = {
    "adapters": (adapters, AS_FLOATS, AS_FLOATS, CLOSE),
    # A frozen layer needs no memory for gradients: the next two are cut.
    "frozen": (frozen, {"down/kernel": 1, "down/bias": 0, "head/kernel": 0}, CUT, CLOSE),
    # Activations are rounded to whole numbers: a last bit may become one of them.
    "whole numbers with adapters": (whole_numbers_with_adapters, {}, AS_FLOATS, {"rtol": 5e-3, "atol": 5e-3}),
}


@pytest.mark.parametrize(
    ("case", "layout_map"),
    [
        pytest.param("adapters", "auto", id="adapters-auto"),
        pytest.param("adapters", UP_AND_DOWN, id="adapters-map"),
        pytest.param("frozen", "auto", id="frozen-auto", marks=pytest.mark.exhaustive),
        pytest.param("frozen", UP_AND_DOWN, id="frozen-map", marks=pytest.mark.exhaustive),
        # Without a map nothing of it is cut.
        pytest.param(
            "whole numbers with adapters", UP_AND_DOWN, id="whole numbers-map", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_training_gives_the_numbers_of_one_device(case, layout_map):
    change, chosen, mapped, close = CASES[case]
    found = []
    for strategy in strategies(layout_map):
        model = made(strategy, change)
        before = {v.path: np.asarray(v) for v in model.non_trainable_variables}
        x, y = data()
        losses = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
        for path, value in before.items():
            now = next(v for v in model.non_trainable_variables if v.path == path)
            np.testing.assert_array_equal(np.asarray(now), value, err_msg=path)
        weights = {v.path: np.asarray(v) for v in model.variables}
        found.append({"losses": losses, "outputs": model.predict(x, verbose=0), **weights})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, err_msg=name, **close)
    assert found[0]["losses"][1] < found[0]["losses"][0]
    assert cut_axes(model) == (chosen if layout_map == "auto" else mapped)
    if case != "frozen":
        # Momenta lie as the adapters.
        momenta = [v for v in model.optimizer.variables if v.path.endswith("momentum")]
        parts = {v.path: stored_value(v).addressable_shards[0].data.shape for v in model.trainable_variables}
        assert [stored_value(v).addressable_shards[0].data.shape for v in momenta] == list(parts.values())


def test_adapters_of_a_trained_model_lie_as_what_they_adapt():
    """A model is trained, and its layers get adapters then: what is cut already decides."""
    _, grid = strategies("auto")
    model = made(grid, lambda model: None)
    x, y = data()
    model.fit(x, y, batch_size=22, verbose=0)
    assert cut_axes(model) == CUT
    with grid.scope():
        adapters(model)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=22, verbose=0)
    assert cut_axes(model) == AS_FLOATS
