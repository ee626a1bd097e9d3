"""Traces whose whole arrays are gathered where they are used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unisono.sharding import _gather_on_use
from unisono.sharding._gather_on_use import gather_on_use, note_part, part_of

PARTS = [np.arange(6, dtype="float32") / 7, np.arange(4, dtype="float32") - 1.5]
WHOLES = [jax.ShapeDtypeStruct((3, 4), "float32"), jax.ShapeDtypeStruct((4, 2), "float32")]


def whole_of(shape, asked):
    def gather(part):
        asked.append(str(part.dtype))
        return jnp.tile(part, 2).reshape(shape)

    return gather


def run(code, dtype="float32"):
    """The results of code on gathered arrays and on whole ones, and the types of what was gathered."""
    parts, asked = [jnp.asarray(p, dtype) for p in PARTS], []
    gathers = [whole_of(w.shape, asked) for w in WHOLES]
    found = jax.jit(lambda ps: gather_on_use(code, ps, WHOLES, gathers))(parts)
    wanted = code([jnp.tile(p, 2).reshape(w.shape) for p, w in zip(parts, WHOLES, strict=True)])
    return found, wanted, asked


X = np.linspace(-1, 1, 6, dtype="float32").reshape(2, 3)


def loss(ws):
    return jnp.sum(jnp.tanh(X @ ws[0]) @ ws[1]) + 0.1 * jnp.sum(ws[0] ** 2)


CODES = {
    "gradient": lambda ws: [loss(ws), *jax.grad(loss)(ws)],
    "compiled function": lambda ws: [jax.jit(loss)(ws), *jax.jit(jax.grad(loss))(ws)],
    "loop": lambda ws: [jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ ws[0]) @ ws[0].T, X)],
    "condition": lambda ws: [jax.lax.cond(X[0, 0] < 0, lambda: X @ ws[0], lambda: X @ ws[0] * 2)],
    "checkpoint": lambda ws: [*jax.grad(jax.checkpoint(loss))(ws)],
    "nothing else": lambda ws: [ws[0], ws[1].T, jnp.sum(ws[0] @ ws[1])],
    "unused": lambda ws: [jnp.asarray(X) * 2],
    "integers and booleans": lambda ws: [ws[0][jnp.asarray([2, 0])], jnp.where(X[:, :1] > 0, ws[1][0], 1.0)],
}


@pytest.mark.parametrize("name", CODES)
def test_the_results_are_those_of_whole_arrays(name):
    found, wanted, _ = run(CODES[name])
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6)


def test_what_a_checkpoint_repeats_is_computed_twice():
    """The compiler may not take it from the forward pass, and so keep that."""

    def products(wrap):
        def program(x, parts):
            layers = wrap(lambda x, ws: jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]))
            gathers = [whole_of(w.shape, []) for w in WHOLES]
            code = jax.grad(lambda ws: jnp.sum(layers(x, ws) ** 2))
            return gather_on_use(code, parts, WHOLES, gathers)

        text = jax.jit(program).lower(X, [jnp.asarray(p) for p in PARTS]).compile().as_text()
        return text.count(" dot(")

    assert products(jax.checkpoint) == products(lambda layers: layers) + 2 == 7


def test_each_use_has_a_gather_of_its_own():
    def layers(ws):
        return jnp.sum(jnp.tanh(X @ ws[0]) @ ws[1])

    _, _, asked = run(lambda ws: [jax.grad(lambda x: jnp.sum(jnp.tanh(x @ ws[0]) @ ws[1]))(jnp.asarray(X))])
    # The first array in both passes; of the second, the derivative needs no product of the forward pass.
    assert len(asked) == 3
    _, _, asked = run(lambda ws: [layers(ws), *jax.grad(layers)(ws)])
    # Not for the derivative by the first layer's input.
    assert len(asked) >= 3


def test_half_precision_is_gathered():
    found, wanted, asked = run(lambda ws: [jnp.asarray(X, "float16") @ ws[0].astype("float16")])
    assert asked == ["float16"]
    np.testing.assert_array_equal(found[0], wanted[0])


def test_a_part_is_kept_bit_for_bit():
    """Also one that is not a number, after values that are none."""
    part = jnp.asarray([np.nan, -0.0, np.inf, 1e-40], "float32")
    whole = jax.ShapeDtypeStruct((4,), "float32")
    for dtype in ("float32", "float16", "int8", "bool", "complex64"):
        other = jnp.full((2, 1), np.nan if dtype in ("float32", "float16", "complex64") else 1, dtype)
        (found,) = gather_on_use(
            lambda ws, other=other: [jax.lax.select(other[0, 0] == other[0, 0], ws[0], ws[0])],
            [part],
            [whole],
            [lambda p: p],
        )
        np.testing.assert_array_equal(np.asarray(found).view("uint32"), np.asarray(part).view("uint32"))


def test_parts_are_known_in_the_trace_alone():
    noted = []

    def code(ws):
        noted.extend(part_of(w) is not None for w in ws)
        own = ws[0] * 2
        noted.append(part_of(own) is None)
        note_part(own, ws[1])
        noted.append(part_of(own) is ws[1])
        return [own]

    gather_on_use(code, PARTS[:1] * 2, [WHOLES[0]] * 2, [whole_of((3, 4), [])] * 2)
    assert all(noted)
    note_part(PARTS[0], PARTS[1])
    assert part_of(PARTS[0]) is None


@pytest.mark.parametrize("is_ahead", [False, True])
def test_gathers_wait_for_their_own_step_or_for_the_one_before(monkeypatch, is_ahead):
    """Small arrays, as biases, are no step of their own."""
    waits = []

    def noting(part, other):
        waits.append((part.size, np.asarray(other).tolist()))
        return part

    monkeypatch.setattr(_gather_on_use, "_not_before", noting)
    monkeypatch.setattr(_gather_on_use, "_LARGE", 16)
    parts = [jnp.ones(2), jnp.ones(1), 2 * jnp.ones(2), jnp.ones(1), 3 * jnp.ones(2)]
    shapes = [(2, 2), (2,), (2, 2), (2,), (2, 2)]
    wholes = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    x = jnp.asarray([[1.0, 2.0]])

    def code(ws):
        first, one, second, other, third = ws
        return [((x @ first + one) @ second + other) @ third]

    found = gather_on_use(code, parts, wholes, [whole_of(shape, []) for shape in shapes], is_ahead)
    whole = [jnp.tile(part, 2).reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    np.testing.assert_array_equal(found[0], code(whole)[0])
    inputs = [[[1.0, 2.0]], [[4.0, 4.0]], [[17.0, 17.0]]]
    kernels = [wait for size, wait in waits if size == 2]
    assert kernels == (inputs[:2] if is_ahead else inputs)
    biases = [wait for size, wait in waits if size == 1]
    assert biases == (inputs[:2] if is_ahead else [[[3.0, 3.0]], [[16.0, 16.0]]])
