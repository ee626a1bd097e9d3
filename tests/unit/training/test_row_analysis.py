"""What a function does with rows: each claim of the reading against what the function computes."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from unisono.training.rows import _row_derivatives
from unisono.training.rows._row_analysis import RowUse, row_uses, traced_states
from unisono.training.rows._row_states import Extreme, Mixed, RowWise

ops = keras.ops
APART, SUM, MEAN, NONE, MIXED = (RowUse[n] for n in ("APART", "SUM", "MEAN", "NONE", "MIXED"))


def states_of(*args, **kwargs):
    """Return the states of a function's results."""
    return traced_states(*args, **kwargs)[1]


def widest(p, width):
    return jax.lax.reduce_window(p, -np.inf, jax.lax.max, (1, width), (1, 1), "SAME")


def repeated(y):
    """The first column as often as there are rows."""
    return y[:, :1] * jnp.ones((1, y.shape[0]))


def counted(y, p):
    return jnp.zeros(5).at[jnp.clip(y, 0, 4).astype("int32")].add(p)


def in_pairs(p):
    return ops.reshape(p, (-1, 2, 5)) - ops.mean(ops.reshape(p, (-1, 2, 5)), axis=1, keepdims=True)


TABLE = jnp.asarray(np.random.default_rng(9).uniform(0.5, 1.5, (9, 5)), "float32")

#: For functions of `y` and `p`, of shape (rows, 5).
FUNCTIONS = {
    "squares": (APART, lambda y, p: ops.mean(ops.square(y - p), axis=-1)),
    "norm": (APART, lambda y, p: ops.norm(y - p, axis=-1)),
    "softmax": (APART, lambda y, p: ops.softmax(p)),
    "sort": (APART, lambda y, p: ops.sort(p, axis=-1)),
    "largest": (APART, lambda y, p: ops.top_k(p, 2)[0]),
    "cumulated": (APART, lambda y, p: ops.cumsum(p, axis=1)),
    "column": (APART, lambda y, p: p[:, 0] - y[:, 1]),
    "reversed columns": (APART, lambda y, p: p[:, ::-1]),
    "chosen": (APART, lambda y, p: ops.take_along_axis(p, ops.argmax(y, axis=-1, keepdims=True), axis=-1)),
    "where": (APART, lambda y, p: ops.where(y > 0, p, -p)),
    "vmap": (APART, lambda y, p: jax.vmap(lambda a, b: jnp.sum(a * jnp.tanh(b)))(y, p)),
    "scan over columns": (APART, lambda y, p: jax.lax.scan(lambda c, x: (c * 0.9 + x, c), p[:, 0], p.T)[0]),
    "product with a matrix": (APART, lambda y, p: p @ np.arange(15.0, dtype="f4").reshape(5, 3)),
    "table": (APART, lambda y, p: jnp.take(np.arange(9.0, dtype="f4"), jnp.argmax(p, axis=-1), axis=0)),
    "convolution": (APART, lambda y, p: ops.conv(p[..., None], np.ones((3, 1, 2), "f4"))),
    "pooling": (APART, lambda y, p: keras.layers.MaxPooling1D(2)(p[..., None])),
    "written into a column": (APART, lambda y, p: p.at[:, 1].set(y[:, 0])),
    "sorted by index": (APART, lambda y, p: ops.take_along_axis(p, ops.argsort(y, axis=-1), axis=-1)),
    "median": (APART, lambda y, p: ops.median(p, axis=-1)),
    "searched": (APART, lambda y, p: jnp.searchsorted(jnp.arange(3.0), p)),
    "NaN": (APART, lambda y, p: ops.where(y > 5, jnp.nan, p)),
    "unstacked": (APART, lambda y, p: jax.vjp(lambda x: ops.stack([x, -x]), p)[1](jnp.stack([y, p]))[0]),
    "solved": (APART, lambda y, p: jnp.linalg.solve(4 * jnp.eye(2) + p[:, None, :2], y[:, :2, None])),
    "gradient of a spectrum": (
        MEAN, lambda y, p: jax.grad(lambda w: ops.mean(jnp.abs(jnp.fft.fft(p * w)) ** 2))(jnp.ones(5))
    ),
    "factors": (
        MEAN, lambda y, p: jax.grad(lambda w: ops.mean(ops.square((p * w).at[:, 1].mul(0.5))))(jnp.ones(5))
    ),
    "branch": (APART, lambda y, p: jax.lax.cond(p.shape[1] > 3, lambda q: q * 2, lambda q: q, p)),
    "mean": (MEAN, lambda y, p: ops.mean(ops.square(y - p))),
    "two means": (MEAN, lambda y, p: ops.mean(ops.square(y - p)) + 0.1 * ops.mean(ops.abs(p)) + 3.0),
    "means and a constant": (MEAN, lambda y, p: ops.stack([ops.mean(y * p), 3.0, ops.mean(p)])),
    "chosen weights": (MEAN, lambda y, p: ops.where(np.arange(5) > 2, ops.mean(p, axis=0), 2.0)),
    "divided by the rows": (MEAN, lambda y, p: ops.sum(y - p) / ops.cast(ops.shape(y)[0], "float32")),
    "divided before": (MEAN, lambda y, p: ops.sum(ops.abs(y - p) / y.shape[0])),
    "divided by a count": (MEAN, lambda y, p: ops.divide_no_nan(ops.sum(y * p), ops.sum(ops.ones_like(p)))),
    "divided by the size": (MEAN, lambda y, p: ops.sum(y * p) / ops.size(p)),
    "times a share": (MEAN, lambda y, p: ops.sum(y * p) * (1.0 / jnp.float32(y.shape[0]))),
    "share of hits": (MEAN, lambda y, p: ops.mean(ops.cast(ops.argmax(p, -1) == 2, "float32"))),
    "mean of columns": (MEAN, lambda y, p: ops.mean(y * p, axis=0)),
    "sum": (SUM, lambda y, p: ops.sum(ops.abs(y - p))),
    "sum over a number": (SUM, lambda y, p: ops.sum(ops.abs(y - p)) / 32),
    "product over rows": (SUM, lambda y, p: ops.vdot(ops.ravel(y), ops.ravel(p))),
    "einsum": (SUM, lambda y, p: ops.einsum("ij,ij->", y, p)),
    "covariance": (SUM, lambda y, p: ops.transpose(y) @ p),
    "histogram": (SUM, lambda y, p: ops.segment_sum(p, ops.argmax(y, -1), num_segments=5)),
    "constant": (NONE, lambda y, p: ops.ones(()) * 3.0),
    "sums and a constant": (MIXED, lambda y, p: ops.stack([ops.sum(y * p), 3.0])),
    "root of a mean": (MIXED, lambda y, p: ops.sqrt(ops.mean(ops.square(y - p)))),
    "mean and sum": (MIXED, lambda y, p: ops.mean(ops.square(y - p)) + 0.1 * ops.sum(ops.abs(p))),
    "weighted mean": (MIXED, lambda y, p: ops.sum(y * p) / ops.sum(y)),
    "sum and constant": (MIXED, lambda y, p: ops.sum(y * p) + 1.0),
    "pairs": (MIXED, lambda y, p: ops.logsumexp(p @ ops.transpose(p), axis=1)),
    "neighbours": (MIXED, lambda y, p: ops.relu(1 - ops.abs(p - ops.roll(p, 1, axis=0)))),
    "deviation": (MIXED, lambda y, p: ops.std(p)),
    "centered": (MIXED, lambda y, p: p - ops.mean(p, axis=0)),
    "largest of all": (MIXED, lambda y, p: ops.max(p)),
    "sorted rows": (MIXED, lambda y, p: ops.sort(p, axis=0)),
    "softmax over rows": (MIXED, lambda y, p: ops.softmax(p, axis=0)),
    "first row": (MIXED, lambda y, p: p[0]),
    "numbered rows": (MIXED, lambda y, p: p * ops.arange(p.shape[0], dtype="float32")[:, None]),
    "logarithm of the rows": (MIXED, lambda y, p: ops.mean(p) * np.log(y.shape[0])),
    "another function for few rows": (MIXED, lambda y, p: ops.tanh(p) if len(p) < 5 else p),
    "reshaped across rows": (MIXED, lambda y, p: ops.reshape(p, (5, -1))),
    "as many columns as rows": (MIXED, lambda y, p: p[:, :1] + ops.zeros((p.shape[0], p.shape[0]))),
    "constants, as many columns as rows": (MIXED, lambda y, p: ops.ones((p.shape[0], p.shape[0]))),
    "groups of rows": (MIXED, lambda y, p: in_pairs(p)),
    "sums of groups of rows": (MIXED, lambda y, p: ops.sum(ops.square(ops.sum(in_pairs(p), axis=1)))),
    "groups of columns": (APART, lambda y, p: ops.reshape(ops.sum(ops.reshape(p, (-1, 5, 1)), 2), (-1, 5))),
    "scan over rows": (MIXED, lambda y, p: jax.lax.scan(lambda c, x: (c + x, c), p[0], p)[1]),
    "hidden in a loop": (MIXED, lambda y, p: jax.lax.fori_loop(0, 3, lambda i, q: q + q.mean(0), p)),
    "window as wide as the rows": (MIXED, lambda y, p: widest(p, p.shape[0])),
    "product over rows and as many columns": (MIXED, lambda y, p: jnp.tensordot(repeated(y), repeated(p), 2)),
    "histogram of rows and as many columns": (MIXED, lambda y, p: counted(repeated(y), repeated(p))),
    "outer difference": (MIXED, lambda y, p: ops.mean(ops.abs(p[:, None] - p[None]))),
    "as many rows of a table": (MIXED, lambda y, p: p + TABLE[: len(p)]),
    "as many rows from a place on": (
        MIXED, lambda y, p: p + jax.lax.dynamic_slice(TABLE, (jnp.int32(1), 0), p.shape)
    ),
    "a table in as many parts": (MIXED, lambda y, p: p[:, 0] + ops.reshape(TABLE[:8], (len(p), -1))[:, 0]),
    "the first part of a table": (MIXED, lambda y, p: p + ops.split(TABLE, [len(p)])[0]),
    "as many of the largest": (MIXED, lambda y, p: p + ops.top_k(TABLE[:, 0], len(p))[0][:, None]),
    "a table for each four rows": (MIXED, lambda y, p: p + ops.tile(TABLE[:4], (len(p) // 4, 1))),
    "a row for each row": (APART, lambda y, p: p + ops.tile(TABLE[:1], (len(p), 1))),
    "a table for each row": (
        APART, lambda y, p: ops.reshape(ops.reshape(p, (-1,)) + ops.tile(TABLE[:5, 0], len(p)), (-1, 5))
    ),
    "written into as many rows": (MIXED, lambda y, p: p + jnp.zeros_like(p).at[:4].set(TABLE[:4])),
    "power of the rows": (MIXED, lambda y, p: p * TABLE[0, 0] ** len(p)),
    "product of a constant": (MIXED, lambda y, p: p * ops.prod(ops.broadcast_to(TABLE[0, 0], (len(p),)))),
    "transformed": (MIXED, lambda y, p: jnp.abs(jnp.fft.fft(p, axis=0))),
}  # fmt: skip


def data(rows):
    rng = np.random.default_rng(rows)
    return [rng.normal(size=(rows, 5)).astype("f4") for _ in range(2)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_reading(name):
    expected, fn = FUNCTIONS[name]
    assert set(row_uses(fn, tuple(data(4)), 4, 8)) == {expected}
    whole, parts = _computed(fn)
    if expected is APART:
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-5, atol=1e-6)
    if expected in (MEAN, NONE):
        np.testing.assert_allclose(np.mean(parts, axis=0), whole, rtol=1e-5, atol=1e-6)
    if expected is SUM:
        np.testing.assert_allclose(np.sum(parts, axis=0), whole, rtol=1e-5, atol=1e-5)


def _computed(fn):
    y, p = data(8)
    whole = fn(jnp.asarray(y), jnp.asarray(p))
    return whole, [np.asarray(fn(jnp.asarray(y[i : i + 4]), jnp.asarray(p[i : i + 4]))) for i in (0, 4)]


#: Keras' losses in which rows meet: the whole batch's sums, pairs, or a look at all labels at once.
MEETING = {"Circle", "Dice", "Tversky", "Hinge", "SquaredHinge"}
LOSSES = {
    name: cls
    for name, cls in vars(keras.losses).items()
    if inspect.isclass(cls) and issubclass(cls, keras.Loss) and cls is not keras.Loss
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_keras(name):
    loss = LOSSES[name](reduction="none")
    y, p = data(4)
    if name.startswith("Sparse") or name in ("Circle", "CategoricalGeneralizedCrossEntropy"):
        y = np.arange(4, dtype="i4")
    if name == "CTC":
        y, p = np.ones((4, 2), "i4"), np.zeros((4, 6, 5), "f4")
    expected = MIXED if name in MEETING else APART
    assert row_uses(loss, (y, p), 4, 8) == [expected]


def test_random_numbers_of_a_row_are_its_own_where_each_replica_has_a_key():
    """With one key for all, the first rows of all replicas would have the same numbers."""

    def noisy(p, key):
        return p + jax.random.normal(key, p.shape)

    for own, expected in ([0], RowWise(0)), ([], Mixed()):
        assert states_of(noisy, (data(4)[0],), (jax.random.PRNGKey(0),), 4, 8, own) == [expected]


def test_values_around_the_function_do_not_depend_on_rows():
    def outer(weights, p):
        return row_uses(lambda p: p @ weights, (jnp.zeros((4, 5)),), 4, 8)[0]

    found = []
    jax.eval_shape(lambda w: found.append(outer(w, None)), jnp.zeros((5, 2)))
    assert found == [APART]


def test_scalars_are_the_same_for_all_rows():
    assert row_uses(lambda a, b: a * b, (data(4)[0], np.float32(2.0)), 4, 8) == [APART]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: jnp.max(x), Extreme(True)),
        (lambda x: jnp.any(x > 0), Extreme(True)),
        (lambda x: jnp.floor(jnp.max(x)).astype("int32"), Extreme(True)),
        # A negative number is not false, and its logarithm is NaN, the largest of all.
        (lambda x: jax.lax.convert_element_type(jnp.max(x), bool), Mixed()),
        (lambda x: jnp.max(x).astype("uint8"), Mixed()),
        (lambda x: jnp.log(jnp.max(x)), Mixed()),
        # Bits of integers are no order.
        (lambda x: jax.lax.reduce_or(x[:, 0].astype("int32"), (0,)), Mixed()),
        (lambda x: jnp.max(x).astype("int32") & 3, Mixed()),
        (lambda x: jnp.max(x).astype("int32").astype("int8"), Mixed()),
        (lambda x: jnp.sum(x > 0).astype(bool), Mixed()),
    ],
)
def test_largest_values(fn, expected):
    assert states_of(fn, (data(4)[0],), (), 4, 8) == [expected]


def with_gradient(backward):
    """The identity with a derivative of its own."""

    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, g: (backward(g),))
    return identity


def with_tangent(forward):
    """The identity with a forward derivative of its own, of values and tangents."""

    @jax.custom_jvp
    def identity(x):
        return x

    identity.defjvp(lambda xs, ts: (xs[0], forward(xs[0], ts[0])))
    return identity


@pytest.mark.parametrize(
    ("fn", "is_apart"),
    [
        (with_gradient(lambda g: -g), True),
        (with_gradient(lambda g: g / (1e-6 + jnp.linalg.norm(g))), False),
        # One device clips the gradient of a mean over more rows, which is smaller.
        (with_gradient(lambda g: jnp.clip(g, -1, 1)), False),
        (with_tangent(lambda x, t: jnp.sin(x) * t), True),
        (with_tangent(lambda x, t: 0 * t), True),
        (with_tangent(lambda x, t: t - t.mean(0)), False),
        (with_tangent(lambda x, t: x.mean() * t), False),
        (with_tangent(lambda x, t: t / x.shape[0]), False),
        (jax.nn.relu, True),
        (jax.nn.gelu, True),
        (jax.nn.log_sigmoid, True),
        (lambda x: ops.relu(x @ jax.nn.relu(jnp.ones((5, 5)))), True),
    ],
)
def test_derivatives_of_a_function_s_own(fn, is_apart):
    expected = RowWise(0) if is_apart else Mixed()
    assert states_of(fn, (data(4)[0],), (), 4, 8, differentiates=True) == [expected]
    assert states_of(fn, (data(4)[0],), (), 4, 8) == [RowWise(0)]


def test_a_derivative_is_read_without_a_word_of_jax():
    """DeprecationWarnings of JAX' modules are errors nowhere else."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = (data(4)[0],), (), 4, 8
        assert states_of(jax.nn.relu, *given, differentiates=True) == [RowWise(0)]


@pytest.mark.parametrize("fn", [jax.nn.relu, jax.nn.relu6, ops.relu])
def test_a_forward_derivative_is_enough_where_rows_stay_apart(fn, monkeypatch):
    monkeypatch.delattr(_row_derivatives, "_derivative")
    assert states_of(fn, (data(4)[0],), (), 4, 8, differentiates=True) == [RowWise(0)]


def test_derivatives_with_weights():
    """The gradient of weights is a sum over the rows, of which replicas take the mean."""

    def call(x, w, backward):
        return x @ with_gradient(backward)(w)

    for backward, expected in (jnp.negative, RowWise(0)), (jnp.sign, Mixed()):
        states = states_of(
            lambda x, w, f=backward: call(x, w, f),
            (data(4)[0],), (np.ones((5, 5), "f4"),), 4, 8, differentiates=True,
        )  # fmt: skip
        assert states == [expected]
