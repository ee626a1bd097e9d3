"""Which axes of weights are cut, by the traced programs of small models; and why not the others."""

import jax
import jax.numpy as jnp
import keras
import pytest

from unisono.model_parallel._automatic_cut import GivenWeight, choose_cuts, cuts_and_reasons, loop_messages
from unisono.model_parallel._axis_flow import AxisFlow
from unisono.model_parallel._axis_rules import RULES

L, ops = keras.layers, keras.ops

ROWS, STEPS, WIDTH = 4, 6, 16


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def axes_of(function, weights, *arrays, size=2, small=0, message=0, **facts):
    """The axis of each weight of a function of a dict of them, by name. Messages in loops have no price."""
    program = jax.make_jaxpr(function)(weights, *arrays)
    given = {i: facts.get(name, GivenWeight(True)) for i, name in enumerate(sorted(weights))}
    found = {
        n: axis for cut in choose_cuts(program, given, size, small, message) for n, axis in cut.axes.items()
    }
    return {name: found.get(i) for i, name in enumerate(sorted(weights))}


def axes_of_model(model, *arrays, size=2, small=0, message=0):
    """The axis of each weight of a Keras model, by the end of its path."""
    variables = model.variables

    def forward(values, *arrays):
        with keras.StatelessScope(zip(variables, values, strict=True)) as scope:
            outputs = model(arrays[0] if len(arrays) == 1 else list(arrays), training=True)
        return outputs, [scope.get_current_value(v) for v in model.non_trainable_variables]

    program = jax.make_jaxpr(forward)([shape(*v.shape, dtype=v.dtype) for v in variables], *arrays)
    given = {i: GivenWeight(v.trainable) for i, v in enumerate(variables)}
    found = {
        n: axis for cut in choose_cuts(program, given, size, small, message) for n, axis in cut.axes.items()
    }
    names = {i: "/".join(v.path.split("/")[-2:]) for i, v in enumerate(variables) if "seed" not in v.path}
    return {name: found.get(i) for i, name in names.items()}


def relu_of(w, x):
    return jax.nn.relu(x @ w["a"] + w["a_bias"]) @ w["b"] + w["b_bias"]


TWO = {"a": shape(16, 64), "a_bias": shape(64), "b": shape(64, 16), "b_bias": shape(16)}
CUT = {"a": 1, "a_bias": 0, "b": 0, "b_bias": None}
X = shape(ROWS, 16)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        lambda f: lambda w, x: jax.lax.cond(x[0, 0] > 0, f, lambda w, x: 2 * f(w, x), w, x),
        lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, x[:, None])[:, 0],
        lambda f: lambda w, x: jax.lax.scan(lambda h, _: (f(w, h), None), x, length=3)[0],
        lambda f: lambda w, x: jax.lax.fori_loop(0, 3, lambda _, h: f(w, h), x),
    ],
    ids=["plain", "call", "remat", "branches", "rows", "scan", "while"],
)
def test_two_products_in_a_row_share_the_axis_between_them(wrap):
    """Column, then row; the bias between goes along, and the one behind stays whole: one all-reduce."""
    assert axes_of(wrap(relu_of), TWO, X) == CUT


def test_a_derivative_that_a_user_has_written_is_no_obstacle():
    @jax.custom_vjp
    def twice(x):
        return 2 * x

    twice.defvjp(lambda x: (twice(x), None), lambda _, g: (2 * g,))
    assert axes_of(lambda w, x: twice(x @ w["a"] + w["a_bias"]) @ w["b"] + w["b_bias"], TWO, X) == CUT


def test_what_does_not_divide_stays_whole():
    odd = {"a": shape(16, 63), "a_bias": shape(63), "b": shape(63, 15), "b_bias": shape(15)}
    assert set(axes_of(relu_of, odd, X).values()) == {None}
    assert axes_of(relu_of, TWO, X, size=64) == CUT
    assert set(axes_of(relu_of, TWO, X, size=128).values()) == {None}


def test_small_weights_stay_whole():
    assert set(axes_of(relu_of, TWO, X, small=1 << 14).values()) == {None}
    assert axes_of(relu_of, TWO, X, small=1 << 13) == CUT


def test_every_second_axis_of_a_chain_is_cut():
    weights = {name: shape(64, 64) for name in "abcd"}

    def chain(w, x):
        for name in "abcd":
            x = jnp.tanh(x @ w[name])
        return x

    assert axes_of(chain, weights, shape(ROWS, 64)) == {"a": 1, "b": 0, "c": 1, "d": 0}


def test_a_residual_axis_is_not_cut():
    """It would be all-reduced in each layer for each of its products; and its normalization, too."""

    def block(w, x):
        for i in "01":
            h = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True) * w[f"scale_{i}"]
            x = x + jax.nn.gelu(h @ w[f"up_{i}"]) @ w[f"down_{i}"]
        return x

    each = {"up": shape(WIDTH, 64), "down": shape(64, WIDTH), "scale": shape(WIDTH)}
    found = axes_of(block, {f"{n}_{i}": s for n, s in each.items() for i in "01"}, shape(ROWS, STEPS, WIDTH))
    assert found == {f"{n}_{i}": a for n, a in {"up": 1, "down": 0, "scale": None}.items() for i in "01"}


def attention(w, x, heads=4):
    def split(y):
        return y.reshape(ROWS, STEPS, heads, -1).transpose(0, 2, 1, 3)

    q, k, v = (split(x @ w[n]) for n in "qkv")
    scores = jax.nn.softmax(q @ k.swapaxes(-1, -2))
    return x + (scores @ v).transpose(0, 2, 1, 3).reshape(ROWS, STEPS, -1) @ w["o"]


def test_heads_that_a_reshape_splits_and_merges_are_cut():
    weights = {n: shape(WIDTH, 32) for n in "qkv"} | {"o": shape(32, WIDTH)}
    x = shape(ROWS, STEPS, WIDTH)
    assert axes_of(attention, weights, x) == {"q": 1, "k": 1, "v": 1, "o": 0}
    # Three heads do not lie on two devices.
    weights = {n: shape(WIDTH, 33) for n in "qkv"} | {"o": shape(33, WIDTH)}
    assert set(axes_of(lambda w, x: attention(w, x, 3), weights, x).values()) == {None}


@pytest.mark.parametrize(
    ("layer", "size", "expected"),
    [
        (lambda: L.MultiHeadAttention(4, 8), 2, [1, 0, 1, 0, 1, 0, 0, None]),
        (lambda: L.GroupQueryAttention(8, 4, 2), 2, [1, 0, 1, 0, 1, 0, 0, None]),
        # Two heads of keys do not divide over four devices, and stay whole; four of queries do.
        (lambda: L.GroupQueryAttention(8, 4, 2), 4, [1, 0, None, None, None, None, 0, None]),
    ],
)
def test_attention_is_cut_by_heads(layer, size, expected):
    x = keras.Input((STEPS, WIDTH))
    n = L.LayerNormalization()(x)
    found = axes_of_model(keras.Model(x, x + layer()(n, n)), shape(ROWS, STEPS, WIDTH), size=size)
    assert [found.pop(k) for k in list(found) if "norm" in k] == [None, None]
    names = [f"{n}/{w}" for n in ("query", "key", "value", "attention_output") for w in ("kernel", "bias")]
    assert [found[name] for name in names] == expected


def fused_attention(w, x, order, heads=4):
    """One kernel for queries, keys and values, whose columns are in one of three orders."""
    rows, steps, _ = x.shape
    h = x @ w["fused"] + w["bias"]
    if order == "split in three":
        q, k, v = (y.reshape(rows, steps, heads, -1) for y in jnp.split(h, 3, -1))
    elif order == "three, heads":
        q, k, v = jnp.moveaxis(h.reshape(rows, steps, 3, heads, -1), 2, 0)
    else:
        q, k, v = jnp.moveaxis(h.reshape(rows, steps, heads, 3, -1), 3, 0)
    scores = jax.nn.softmax(jnp.einsum("bnhd,bmhd->bhnm", q, k))
    return x + jnp.einsum("bhnm,bmhd->bnhd", scores, v).reshape(rows, steps, -1) @ w["out"]


@pytest.mark.parametrize("order", ["split in three", "three, heads", "heads, three"])
def test_a_fused_kernel_is_cut_by_heads_or_pays_for_gathers(order):
    weights = {"fused": shape(64, 192), "bias": shape(192), "out": shape(64, 64)}
    x = shape(64, 16, 64)
    found = axes_of(lambda w, x: fused_attention(w, x, order), weights, x)
    if order == "heads, three":
        assert found == {"fused": 1, "bias": 0, "out": 0}
        return
    # A half of the columns is no number of heads: the result would be gathered.
    assert (found["fused"], found["bias"]) == (None, None)
    program = jax.make_jaxpr(lambda w, x: fused_attention(w, x, order))(weights, x)
    _, reasons = cuts_and_reasons(program, dict.fromkeys(range(3), GivenWeight(True)), 2, 0)
    assert reasons[1].startswith("sends 786.4 kB to save")
    few = shape(1, 4, 64)
    assert axes_of(lambda w, x: fused_attention(w, x, order), weights, few)["fused"] is not None


def test_a_weight_that_is_whole_has_a_reason():
    def reasons_of(function, weights, *arrays, size=2, small=0):
        program = jax.make_jaxpr(function)(weights, *arrays)
        given = dict.fromkeys(range(len(weights)), GivenWeight(True))
        cuts, reasons = cuts_and_reasons(program, given, size, small)
        assert {n for cut in cuts for n in cut.axes} | reasons.keys() == given.keys()
        return {name: reasons.get(i, "") for i, name in enumerate(sorted(weights))}

    assert set(reasons_of(relu_of, TWO, X, small=1 << 14).values()) == {"small"}
    odd = {"a": shape(15, 63), "a_bias": shape(63), "b": shape(63, 15), "b_bias": shape(15)}
    assert set(reasons_of(relu_of, odd, shape(ROWS, 15)).values()) == {"no axis divides by 2"}
    many = reasons_of(relu_of, TWO, shape(1 << 12, 16))
    assert many["b_bias"].startswith("sends ")
    positions = {"places": shape(2 * STEPS, 2048), "a": shape(2048, 3)}
    found = reasons_of(lambda w, x: (x + w["places"][:STEPS]) @ w["a"], positions, shape(4, STEPS, 2048))
    assert found["places"] in (
        "it would be gathered",
        "its axes are a batch's",
        "sends 196.6 kB to save 0.0 kB",
    )


def test_an_embedding_and_its_head_are_cut_by_vocabulary():
    """Tied or not; positions stay whole."""

    def tied(w, x):
        h = w["words"][x] + w["places"][:STEPS]
        return jax.nn.log_softmax(h @ w["words"].T).mean()

    x = shape(ROWS, STEPS, dtype="int32")
    weights = {"words": shape(512, WIDTH), "places": shape(2 * STEPS, WIDTH)}
    assert axes_of(tied, weights, x) == {"words": 0, "places": None}
    assert axes_of(tied, weights | {"places": shape(STEPS, WIDTH)}, x) == {"words": 0, "places": None}
    both = {"head": shape(WIDTH, 512), "words": shape(512, WIDTH)}
    found = axes_of(lambda w, x: jax.nn.log_softmax(w["words"][x] @ w["head"]).mean(), both, x)
    assert found == {"head": 1, "words": 0}


def test_convolutions_are_cut_by_channels():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            *(L.Conv2D(32, 3, padding="same", name="first"), L.BatchNormalization(name="norm"), L.ReLU()),
            *(L.DepthwiseConv2D(3, name="each"), L.Conv2D(64, 3, name="second"), L.MaxPooling2D()),
            *(L.GlobalAveragePooling2D(), L.Dense(10, name="head")),
        ]
    )
    assert axes_of_model(model, shape(ROWS, 8, 8, 3), small=1 << 12) == {
        "first/kernel": 3,
        "each/kernel": 2,
        "second/kernel": 2,
        "head/kernel": None,
        **dict.fromkeys(("norm/gamma", "norm/beta", "norm/moving_mean", "norm/moving_variance"), 0),
        "first/bias": 0,
        "each/bias": 0,
        "second/bias": None,
        "head/bias": None,
    }


def test_a_flatten_that_mixes_channels_is_a_border():
    """Pixels come before channels in a row: the layer behind is cut by its outputs."""
    model = keras.Sequential(
        [
            *(keras.Input((8, 8, 4)), L.Conv2D(32, 3, padding="same", name="conv"), L.Flatten()),
            *(L.Dense(64, activation="relu", name="wide"), L.Dense(10, name="head")),
        ]
    )
    found = axes_of_model(model, shape(ROWS, 8, 8, 4), small=1 << 12)
    assert (found["wide/kernel"], found["head/kernel"]) == (1, 0)


def test_experts_lie_on_different_devices():
    def experts(w, x):
        gates = jax.nn.softmax(x @ w["gate"])
        best, numbers = jax.lax.top_k(gates, 2)
        mix = (jax.nn.one_hot(numbers, 4) * best[..., None]).sum(-2)
        h = jax.nn.gelu(jnp.einsum("rd,edh->erh", x, w["up"]))
        return x + jnp.einsum("erh,ehd,re->rd", h, w["down"], mix)

    weights = {"gate": shape(WIDTH, 4), "up": shape(4, WIDTH, 32), "down": shape(4, 32, WIDTH)}
    assert axes_of(experts, weights, shape(ROWS, WIDTH)) == {"gate": 1, "up": 0, "down": 0}
    # Three experts do not divide: the hidden axis of each does.
    weights = {"gate": shape(WIDTH, 3), "up": shape(3, WIDTH, 32), "down": shape(3, 32, WIDTH)}

    def all_experts(w, x):
        h = jnp.tanh(jnp.einsum("rd,edh->erh", x, w["up"]))
        return jnp.einsum("erh,ehd,re->rd", h, w["down"], x @ w["gate"])

    assert axes_of(all_experts, weights, shape(ROWS, WIDTH)) == {"gate": None, "up": 2, "down": 1}


def test_recurrent_layers_are_read_into():
    model = keras.Sequential(
        [keras.Input((STEPS,), dtype="int32"), L.Embedding(512, 64), L.LSTM(64), L.Dense(16, name="head")]
    )
    found = axes_of_model(model, shape(ROWS, STEPS, dtype="int32"), small=1 << 14)
    assert found["embedding/embeddings"] == 0
    assert found["lstm_cell/kernel"] == found["lstm_cell/recurrent_kernel"] == 1


def test_layers_that_a_scan_goes_over_are_cut_within():
    def layers(w, x):
        return jax.lax.scan(lambda h, v: (h + jnp.tanh(h @ v["up"]) @ v["down"], None), x, w)[0]

    weights = {"up": shape(3, WIDTH, 64), "down": shape(3, 64, WIDTH)}
    # Each layer has weights of its own: their messages are no more than those of layers in a row.
    for message in (0, 1 << 30):
        found = axes_of(layers, weights, shape(ROWS, WIDTH), message=message)
        assert found == {"up": 2, "down": 1}


@pytest.mark.parametrize("layer", [L.LSTM, L.GRU])
def test_a_message_in_each_step_of_a_sequence_has_a_price(layer):
    """What is cut before and behind a recurrent layer costs none, and is cut; the layer is not."""
    model = keras.Sequential(
        [
            *(keras.Input((STEPS,), dtype="int32"), L.Embedding(512, 64, name="words"), layer(64)),
            *(L.Dense(256, activation="relu", name="up"), L.Dense(16, name="down")),
        ]
    )
    tokens = shape(ROWS, STEPS, dtype="int32")
    found = axes_of_model(model, tokens, message=1 << 16)
    cells = [path for path in found if "cell" in path]
    assert len(cells) == 3
    assert {found.pop(path) for path in cells} == {None}
    assert (found["words/embeddings"], found["up/kernel"], found["down/kernel"]) == (0, 1, 0)
    found = axes_of_model(model, tokens, message=0)
    assert found[cells[1]] is not None, cells[1]


def test_a_large_weight_that_no_class_cuts_is_cut_alone():
    """Where its parts need fewer bytes than they save; else not. Sequences and rows are never cut."""

    def single(w, x):
        h = x @ w["fused"]
        q, k, v = jnp.split(h, 3, -1)
        return (q * k).sum(-1, keepdims=True) * v

    weights = {"fused": shape(512, 3 * 512)}
    assert axes_of(single, weights, shape(ROWS, 512)) != {"fused": None}
    assert axes_of(single, weights, shape(4096, 64, 512)) == {"fused": None}
    # For a weight that is joined with another in the program, a gather would be needed.
    joined = {"a": shape(512, 512), "b": shape(512, 512)}
    found = axes_of(lambda w, x: jnp.split(x @ jnp.concatenate([w["a"], w["b"]], 1), 2, -1)[0], joined, X2)
    assert 1 not in found.values()


X2 = shape(ROWS, 512)


def test_what_lies_already_stays():
    """And others go with it, or lie beside it, but cut nothing in a second way."""
    as_is = {"a": GivenWeight(True, True, None), "a_bias": GivenWeight(True, True, None)}
    assert axes_of(relu_of, TWO, X, **as_is) == {"a": None, "a_bias": None, "b": 0, "b_bias": None}
    columns = {"a": GivenWeight(True, True, 1)}
    assert axes_of(relu_of, TWO, X, small=1 << 20, **columns) == {**CUT, "a": None}
    rows = {"b": GivenWeight(True, True, 1)}
    assert axes_of(relu_of, TWO, X, **rows)["a"] in (None, 0)


def test_a_step_with_its_gradients_is_read_as_it_is():
    def step(w, x):
        grads = jax.grad(lambda w: jnp.square(relu_of(w, x)).mean())(w)
        return {name: w[name] - 0.1 * g for name, g in grads.items()}

    known = dict.fromkeys(TWO, GivenWeight(False))
    assert axes_of(step, TWO, X, **known) == CUT


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x: x.reshape(4, 3, 2, 5), [0, None]),
        (lambda x: x.reshape(2, 2, 6, 5), [0, 1]),
        (lambda x: x.reshape(24, 5), [0, None]),
        (lambda x: jnp.linalg.qr(x)[0], [None, None]),
        (lambda x: x[None, :, :, None].reshape(1, 4, 30), [0, 1]),
        (lambda x: jnp.sort(x, axis=0), [None, 1]),
        (lambda x: jnp.cumsum(x, axis=1), [0, None]),
        (lambda x: x[:, ::2], [0, None]),
        (lambda x: jnp.pad(x, ((0, 0), (1, 1), (0, 0))), [0, None]),
        (lambda x: jnp.concatenate([x, x], 1), [0, None]),
        (lambda x: jnp.tile(x, (1, 2, 1)), [0, None]),
        (lambda x: jnp.flip(x, 1), [0, None]),
        (lambda x: jnp.stack([x, x]), [0, 1]),
        (lambda x: x.at[:, 1].add(1.0), [0, 1]),
        (lambda x: jax.lax.dynamic_update_slice(x, x[:1], (1, 0, 0)), [None, 1]),
        (lambda x: jnp.argmax(x, -1), [0, 1]),
        (lambda x: jnp.take_along_axis(x, jnp.zeros((4, 1, 5), int), 1), [0, None]),
        (lambda x: jax.random.bernoulli(jax.random.key(0), 0.5, x.shape) * x, [0, 1]),
    ],
)
def test_axes_pass_where_each_index_is_by_itself(function, kept):
    """The first two axes of an array (4, 6, 5), and whether they are axes of the result."""
    flow = AxisFlow(2, RULES)
    results = flow.read(jax.make_jaxpr(function)(shape(4, 6, 5)), {0: True})
    of_results = {flow.root(a) for x in results for a in x.axes}
    found = [i if flow.root(a) in of_results else None for i, a in enumerate(flow.inputs[0].axes[:2])]
    assert found == kept


def test_messages_of_weights_that_a_loop_uses_again_are_counted():
    """A weight behind the loop is none of these, though it is cut along the axis that the loop hands on."""

    def recurrent(w, x):
        def step(h, row):
            h = jnp.tanh(row @ w["input"] + h @ w["state"])
            return h, h

        return jax.lax.scan(step, jnp.zeros((ROWS, 16)), x)[1] @ w["output"]

    weights = {name: shape(16, 16) for name in ("input", "output", "state")}
    program = jax.make_jaxpr(recurrent)(weights, shape(STEPS, ROWS, 16))
    given = {n: GivenWeight(True) for n in range(3)}
    along_input, along_output = (loop_messages(program, given, dict.fromkeys(range(3), a), 2) for a in (0, 1))
    assert along_input[1] == along_output[1] == 0
    assert along_input[2] >= along_input[0] >= STEPS
    assert along_output[2] >= STEPS
    assert loop_messages(program, given, {}, 2) == {}
