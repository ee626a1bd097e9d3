"""Attention and LSTMs as Keras runs them on GPUs: rows stay apart, also in their derivatives.

cuDNN is not needed to trace them: what JAX asks of it is answered here.
"""

import sys
from types import SimpleNamespace

import jax
import jax.experimental.rnn
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as attention

import unisono
from unisono.training.rows._row_analysis import traced_states
from unisono.training.rows._row_states import Mixed, Reduced, RowWise
from unisono.training.trainer._trainer_function import TrainerFunction


@pytest.fixture(autouse=True)
def with_cudnn(monkeypatch):
    sizes = lambda *args: (64, 8 * args[3])  # noqa: E731 (bytes of workspace, and for the derivative)
    stand_in = SimpleNamespace(compute_rnn_workspace_reserve_space_sizes=sizes)
    monkeypatch.setattr(jax.experimental.rnn, "gpu_rnn", stand_in)
    monkeypatch.setattr(sys.modules["keras.src.backend.jax.rnn"], "_is_gpu_available", lambda: True)
    monkeypatch.setattr(attention, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(attention, "check_compute_capability", lambda *args, **others: True)
    monkeypatch.setattr(attention, "is_cuda_compute_capability_equal", lambda *args, **others: False)


def states_of(*args, **kwargs):
    """Return the states of a function's results."""
    return traced_states(*args, **kwargs)[1]


def lstm(x, h, c, w, lengths, dropout=0.0):
    return jax.experimental.rnn.lstm(x, h, c, w, lengths, 5, 3, 1, dropout, False)


WEIGHTS = jax.experimental.rnn.get_num_params_in_lstm(5, 3, 1, False)


def inputs(rows=4):
    state = np.zeros((rows, 1, 3), "float32")
    return np.zeros((rows, 7, 5), "float32"), state, state, np.zeros(rows, "int32")


def of_lstm(fn, *kept, differentiates=True):
    """Return the states of a function of inputs, states with rows first, lengths and the weights."""
    weights = np.zeros(WEIGHTS, "float32")
    return states_of(fn, inputs(), (weights, *kept), 2, 4, (), differentiates)


def test_a_network_keeps_rows_apart():
    def outputs(x, h, c, lengths, w):
        y, h, c = lstm(x, h.swapaxes(0, 1), c.swapaxes(0, 1), w, lengths)
        return y, h, c

    assert of_lstm(outputs) == [RowWise(0), RowWise(1), RowWise(1)]


def test_its_gradients_are_of_rows_and_of_weights():
    def gradients(x, h, c, lengths, w):
        def loss(x, h, w):
            return lstm(x, h.swapaxes(0, 1), c.swapaxes(0, 1), w, lengths)[0].sum()

        return jax.grad(loss, (0, 1, 2))(x, h, w)

    assert of_lstm(gradients, differentiates=False) == [RowWise(0), RowWise(0), Reduced(0)]


@pytest.mark.parametrize(
    "change",
    [
        lambda x, h, c, w: (x[::-1], h, c, w, 0.0),
        lambda x, h, c, w: (x - x.mean(0), h, c, w, 0.0),
        lambda x, h, c, w: (x, h, c, w + x.sum(), 0.0),
        lambda x, h, c, w: (x, h, c, w, 0.5),
    ],
    ids=["other rows", "all rows", "weights of rows", "dropout"],
)
def test_what_relates_rows_is_not_claimed(change):
    def outputs(x, h, c, lengths, w):
        x, h, c, w, dropout = change(x, h.swapaxes(0, 1), c.swapaxes(0, 1), w)
        return lstm(x, h, c, w, lengths, dropout)[0]

    assert isinstance(of_lstm(outputs)[0], Mixed)


def attend(q, k, v, bias=None):
    return jax.nn.dot_product_attention(q, k, v, bias, is_causal=bias is None, implementation="cudnn")


HEADS = np.zeros((4, 64, 2, 32), jnp.bfloat16)


def test_attention_keeps_rows_apart_also_in_its_derivative():
    assert states_of(attend, (HEADS,) * 3, (), 2, 4, (), True) == [RowWise(0)]
    gradients = lambda *heads: jax.grad(lambda *heads: attend(*heads).sum(), (0, 1, 2))(*heads)  # noqa: E731
    assert states_of(gradients, (HEADS,) * 3, (), 2, 4) == [RowWise(0)] * 3


@pytest.mark.parametrize("rows", [1, 4])
def test_a_bias_may_be_of_all_rows(rows):
    bias = np.zeros((rows, 2, 64, 64), jnp.bfloat16)
    gradient = jax.grad(lambda bias, *heads: attend(*heads, bias).astype("float32").sum())
    if rows == 1:
        found = states_of(lambda q, k, v, bias: gradient(bias, q, k, v), (HEADS,) * 3, (bias,), 2, 4)
        assert found == [Reduced(0)]
    else:
        assert states_of(gradient, (bias, *(HEADS,) * 3), (), 2, 4) == [RowWise(0)]


def test_other_rows_in_attention_are_not_claimed():
    found = states_of(lambda q, k, v: attend(q[::-1], k, v), (HEADS,) * 3, (), 2, 4, (), True)
    assert isinstance(found[0], Mixed)


def model_with(layer):
    text = keras.Input((64,), dtype="int32")
    vectors = keras.layers.Embedding(50, 64)(text)
    pooled = layer(vectors) if isinstance(layer, keras.layers.LSTM) else layer(vectors, vectors)[:, 0]
    return keras.Model(text, keras.layers.Dense(2, dtype="float32")(pooled))


@pytest.mark.parametrize("name", ["lstm", "attention"])
def test_each_replica_computes_its_rows(name, monkeypatch):
    """A step of `fit` as on two GPUs, which is traced and not run."""
    seen = []

    class Traced(Exception):
        pass

    prepare = TrainerFunction.prepare

    def traced(self, group):
        program, state, data = prepare(self, group)
        seen.append((group.mode.name, str(program.jaxpr(state, data))))
        if name == "attention":
            seen.append(program._compiled.trace(state, data).lower(lowering_platforms=("cuda",)).as_text())
        raise Traced

    monkeypatch.setattr(TrainerFunction, "prepare", traced)
    with unisono.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        if name == "lstm":
            layer = keras.layers.LSTM(8, use_cudnn=True)
        else:
            layer = keras.layers.MultiHeadAttention(2, 32, flash_attention=True, dtype="mixed_bfloat16")
        model = model_with(layer)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(Traced):
        model.fit(np.zeros((16, 64), "int32"), np.zeros(16, "int32"), batch_size=8, verbose=0)
    (mode, text), *lowered = seen
    assert mode == "SPLIT"
    kind = "rnn" if name == "lstm" else "dot_product_attention"
    assert f"{kind}_fwd" in text
    assert f"{kind}_bwd" in text
    # JAX lowers a network only where cuDNN is, which says how much memory it takes.
    assert all("@__cudnn$fmhaSoftmaxBackward" in program for program in lowered)
