"""Compiled derivatives of recordings: against `jax.grad`, and how many are compiled."""

import collections

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unisono
from unisono.step.eager import _backward
from unisono.step.eager._backward import num_programs

Tape = unisono.GradientTape
L = keras.layers


def stateless(model, x):
    def loss(weights):
        held = [v.value for v in model.non_trainable_variables]
        out, _ = model.stateless_call(weights, held, x, training=True)
        return jnp.mean(out**2)

    return jax.grad(loss)([v.value for v in model.trainable_variables])


def random(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


MODELS = {
    "dense": lambda: ([L.Dense(4, "relu"), L.LayerNormalization(), L.Dense(2, "softmax")], random(8, 3)),
    "convolution": lambda: (
        [
            L.Conv2D(3, 3, activation="gelu"),
            L.MaxPooling2D(),
            L.BatchNormalization(),
            L.Flatten(),
            L.Dense(2),
        ],
        random(4, 8, 8, 1),
    ),
    "recurrent": lambda: ([L.LSTM(3), L.Dense(1)], random(4, 5, 2)),
    "relu in a loop": lambda: ([L.SimpleRNN(3, activation="relu"), L.Dense(1)], random(4, 5, 2)),
    "embedding": lambda: ([L.Embedding(7, 3), L.GlobalAveragePooling1D()], np.arange(12).reshape(3, 4) % 7),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models(kind):
    """The gradients are those of JAX, and a loop compiles once."""
    layers, x = MODELS[kind]()
    model = keras.Sequential(layers)
    model(x)
    expected = stateless(model, x)
    programs = num_programs()
    for _ in range(3):
        with Tape() as tape:
            loss = keras.ops.mean(model(x, training=True) ** 2)
        found = tape.gradient(loss, model.trainable_variables)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)
    assert num_programs() == programs + 1


def test_dropout_is_drawn_once():
    x, layer = jnp.ones((100,)), L.Dropout(0.5)
    with Tape() as tape:
        tape.watch(x)
        y = layer(x, training=True)
    np.testing.assert_array_equal(tape.gradient(y, x), y)


def test_training_with_an_optimizer():
    model = keras.Sequential([L.Dense(8, "relu"), L.Dense(1)])
    optimizer, x = keras.optimizers.Adam(0.05), random(32, 4)
    y = x.sum(1, keepdims=True)
    losses = []
    for _ in range(30):
        with Tape() as tape:
            loss = keras.losses.MeanSquaredError()(y, model(x, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 10


def test_what_a_compiled_function_reads_is_watched():
    v, w = keras.Variable(3.0), keras.Variable(1.0)

    @unisono.function
    def compute(x):
        w.assign_add(1.0)
        return v * v * x

    x = jnp.asarray(2.0)
    for _ in range(2):
        with Tape() as tape:
            tape.watch(x)
            y = compute(x) * v
        grads = tape.gradient(y, [v, x, w])
        assert [None if g is None else float(g) for g in grads] == [54.0, 27.0, None]
    assert float(w.value) == 3.0


def test_inside_a_function_that_jax_traces():
    @jax.jit
    def derivative(x):
        with Tape() as tape:
            tape.watch(x)
            y = jnp.sin(x) * x
        return tape.gradient(y, x)

    assert float(derivative(0.5)) == pytest.approx(np.cos(0.5) * 0.5 + np.sin(0.5))


def test_the_programs_that_were_used_last_are_kept(tuned):
    tuned(_backward, _PROGRAMS=collections.OrderedDict(), _PROGRAMS_KEPT=2)
    made = []
    for key in "abacab":
        assert _backward._program(key, lambda key=key: made.append(key) or key) == key
    # When `c` is made, `b` goes, and `c` for the second `b`.
    assert made == ["a", "b", "c", "b"]
