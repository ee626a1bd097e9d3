"""Backbones of KerasHub with random weights: how their weights are cut, and what a layer sends."""

import contextlib

import keras
import numpy as np
import pytest

import unisono
from tests.support import devices
from unisono.model_parallel._program_messages import messages_of
from unisono.training.trainer._lowered_step import lowered_step

hub = pytest.importorskip("keras_hub", reason="KerasHub is not installed")
pytestmark = [pytest.mark.numbers, pytest.mark.exhaustive]

WORDS, LENGTH, ROWS = 512, 16, 8

#: Arguments that all of them have.
SIZES = {"vocabulary_size": WORDS, "hidden_dim": 64, "intermediate_dim": 256}
GROUPED = {"num_query_heads": 4, "num_key_value_heads": 2}

BACKBONES = {
    "GPT2": {"num_heads": 4, "max_sequence_length": 32, "dropout": 0.0},
    "Llama": GROUPED,
    "Mistral": GROUPED | {"sliding_window": 8, "dropout": 0.0},
    "Gemma": GROUPED | {"head_dim": 16, "dropout": 0.0},
}


def language_model(name, layers):
    """A backbone with its words as the head."""
    kind = getattr(hub.models, f"{name}Backbone")
    backbone = kind(num_layers=layers, **SIZES, **BACKBONES[name])
    return keras.Model(backbone.input, backbone.token_embedding(backbone.output, reverse=True))


def data():
    x = np.random.default_rng(0).integers(1, WORDS, (ROWS, LENGTH))
    return {"token_ids": x, "padding_mask": np.ones_like(x)}, np.roll(x, -1, 1)


def compiled(strategy, name, layers):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = language_model(name, layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, 0.9), loss)
    return model


def grid(layout_map="auto"):
    return unisono.MirroredStrategy(devices(2), devices_per_replica=2, layout_map=layout_map)


def messages(strategy, name, layers):
    """The messages of a compiled step."""
    program = lowered_step(compiled(strategy, name, layers), *data()).compile().as_text()
    return messages_of(program, 2)


@pytest.mark.parametrize("name", BACKBONES)
def test_a_layer_costs_four_all_reduces_and_no_gather(name):
    counts = []
    for layers in (1, 2):
        found = messages(grid(), name, layers)
        assert {m.kind for m in found} == {"all-reduce"}
        counts.append(len(found))
    print(f"{name}: {counts[1] - counts[0]} all-reduces a layer")
    assert counts[1] - counts[0] <= 4
    assert counts[0] > 4


@pytest.mark.parametrize("name", BACKBONES)
def test_numbers_are_those_of_one_device(name):
    found = []
    for strategy in (unisono.OneDeviceStrategy(devices(1)[0]), grid()):
        model = compiled(strategy, name, 1)
        x, y = data()
        losses = model.fit(x, y, batch_size=ROWS, epochs=2, verbose=0, shuffle=False).history["loss"]
        found.append([*losses, *map(np.asarray, model.trainable_variables)])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["Llama", "Gemma"])
def test_maps_of_kerashub_with_everything_that_changes_an_update(name):
    """Low-rank updates of frozen words, accumulated and clipped gradients; against plain Keras."""
    mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"), devices(4))
    layout_map = getattr(hub.models, f"{name}Backbone").get_layout_map(mesh)
    options = {"devices_per_replica": 2, "layout_map": layout_map, "state_layout": "fully_sharded"}
    strategy = unisono.MirroredStrategy(devices(4), **options)
    found = []
    for scope in (contextlib.nullcontext(), strategy.scope()):
        with scope:
            keras.utils.set_random_seed(0)
            model = language_model(name, 1)
            model.get_layer("token_embedding").enable_lora(4)
            optimizer = keras.optimizers.Adam(
                1e-3, epsilon=1e-3, gradient_accumulation_steps=2, global_clipnorm=0.5
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer, loss)
        first = [np.asarray(v) for v in model.trainable_variables]
        x, y = ({k: v[:7] for k, v in data()[0].items()}, data()[1][:7])
        losses = model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False).history["loss"]
        found.append((first, [*losses, *map(np.asarray, model.trainable_variables)]))
    for ours, theirs in zip(found[1][0], found[0][0], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(found[1][1], found[0][1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
