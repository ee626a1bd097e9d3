"""The first compiled step of a layout: one warning where other axes would send less."""

import logging

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unisono
from tests.virtual.strategies.test_replica_grid import grid
from unisono.model_parallel import _layout_review
from unisono.model_parallel._layout_review import LayoutReview

L = keras.layers
STEPS, WIDTH, HEADS = 64, 32, 4

ALONG_HEADS = {
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*(query|key|value)/bias": ("model", None),
    ".*attention_output/kernel": ("model", None, None),
}
ALONG_CHANNELS = {
    ".*(query|key|value)/kernel": (None, None, "model"),
    ".*attention_output/kernel": (None, "model", None),
}


@pytest.fixture(autouse=True)
def small_models(tuned):
    tuned(_layout_review, WORTH=1 << 12, _BESIDES=1 << 10)


def attention():
    x = keras.Input((STEPS, WIDTH))
    return keras.Model(x, L.MultiHeadAttention(HEADS, 8, name="attention")(x, x))


def mlp():
    layers = [L.Dense(4 * WIDTH, activation="relu", name="up"), L.Dense(WIDTH, name="down")]
    return keras.Sequential([keras.Input((WIDTH,)), *layers])


def said(caplog, layout_map, make, loop=False):
    """The warnings about messages in the first steps of a model."""
    strategy = grid(2, 2, layout_map)
    with strategy.scope():
        model = make()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.ones((64, *model.input_shape[1:]), "float32")
    with caplog.at_level(logging.WARNING, "unisono"):
        if loop:
            in_loop(strategy, model, x)
        else:
            model.fit(x, x, batch_size=32, epochs=2, verbose=0)
            model.evaluate(x, x, batch_size=32, verbose=0)
    return [r.getMessage() for r in caplog.records if "devices of a replica" in r.getMessage()]


def in_loop(strategy, model, x):
    def step(rows):
        with unisono.GradientTape() as tape:
            errors = keras.ops.mean((model(rows, training=True) - rows) ** 2, axis=-1)
            loss = unisono.nn.compute_average_loss(errors)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)

    for rows in strategy.distribute_dataset([x, x]):
        strategy.run(step, (rows,))


@pytest.mark.parametrize("loop", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_products_that_are_cut_the_wrong_way_are_named(caplog, loop):
    wrong = {".*up/kernel": ("model", None), ".*down/kernel": (None, "model")}
    (warning,) = said(caplog, wrong, mlp, loop)
    assert "up/kernel' of shape (32, 128), cut along its axis 0, and 1 more" in warning
    assert "Write (None, 'model') for it" in warning


def test_attention_that_is_not_cut_by_heads_is_named(caplog):
    (warning,) = said(caplog, ALONG_CHANNELS, attention)
    assert "Write (None, 'model', None) for it" in warning
    assert "query/kernel" in warning or "key/kernel" in warning


@pytest.mark.exhaustive
def test_a_weight_of_a_loop_is_named_before_those_around_it(caplog):
    """Each step of a recurrent layer sends messages; products of all steps together send one."""

    def lstm():
        x = keras.Input((STEPS, WIDTH))
        h = L.LSTM(WIDTH, return_sequences=True)(x)
        return keras.Model(x, L.Dense(WIDTH, name="down")(L.Dense(4 * WIDTH, "relu", name="up")(h)))

    wrong = {".*(recurrent_|lstm_cell/)kernel": ("model", None)}
    wrong |= {".*up/kernel": ("model", None), ".*down/kernel": (None, "model")}
    (warning,) = said(caplog, wrong, lstm)
    assert "recurrent_kernel' of shape (32, 128), cut along its axis 0, which a loop uses" in warning
    assert "and 3 more" in warning
    assert "Write (None, None) for it" in warning


@pytest.mark.parametrize(
    ("layout_map", "make"),
    [
        ({".*up/kernel": (None, "model"), ".*up/bias": ("model",), ".*down/kernel": ("model", None)}, mlp),
        pytest.param(ALONG_HEADS, attention, marks=pytest.mark.exhaustive),
        pytest.param("auto", attention, marks=pytest.mark.exhaustive),
    ],
)
def test_a_layout_that_sends_what_it_must_is_not_named(caplog, layout_map, make):
    assert said(caplog, layout_map, make) == []


GATHERS = """
ENTRY %main (gate: f32[32,32]) -> f32[32,64] {
  %gate = f32[32,32]{1,0} parameter(0)
  ROOT %whole = f32[32,64]{1,0} all-gather(%gate), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={1}
}
"""


def test_a_weight_that_is_gathered_beyond_what_was_planned_is_named(caplog):
    """Where the axes are those of the estimate, the program is the judge."""
    with grid(2, 2, {"gate": (None, "model")}).scope():
        gate = keras.Variable(np.ones((32, 64), "float32"), name="gate")
    # A program that sends nothing by the estimate: each element by itself.
    program = jax.make_jaxpr(lambda values, x: values[0] * 2 + x)([jnp.ones((32, 64))], 1.0)
    for planned in (8192, 4):
        review = LayoutReview(2, [gate], lambda: program, False, False, planned)
        review.warn(GATHERS)
        said = [r.getMessage() for r in caplog.records]
        assert len(said) == (planned == 4)
    assert "XLA puts the weight 'gate' together, which is cut along its axis 1" in said[0]
