"""Sums over all dimensions but the last, on CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unisono._lowering._sums import column_sums, is_replaced


@pytest.fixture(scope="module", autouse=True)
def installed():
    """A first scope installs the lowerings."""
    import unisono

    with unisono.OneDeviceStrategy("cpu:0").scope():
        pass


SHAPES = [(64, 8, 8, 3), (2048, 2), (63, 33, 5), (4099, 7), (2048, 512), (2, 32, 64, 64)]


@pytest.mark.parametrize("shape", SHAPES)
def test_sums(shape):
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    expected = x.astype("float64").sum(tuple(range(len(shape) - 1)))
    np.testing.assert_allclose(column_sums(x), expected, rtol=1e-5, atol=1e-3)


def test_they_are_in_use():
    """In a program, under `vmap`, in a gradient; small sums, integers, other dimensions are XLA's own."""

    def lowered(f, x):
        return jax.jit(f).lower(x).as_text()

    x = jnp.ones((64, 8, 8, 3))
    assert "dot_general" in lowered(lambda x: x.sum((0, 1, 2)), x)
    bias_gradient = jax.grad(lambda b: (b * x).sum())
    assert "dot_general" in lowered(bias_gradient, jnp.ones(3))
    assert "dot_general" not in lowered(lambda x: x.sum((0, 1)), x)
    assert "dot_general" not in lowered(lambda x: x.sum((0, 1, 2)), x[:4])
    assert "dot_general" not in lowered(lambda x: x.sum((0, 1, 2)), x.astype("int32"))
    each = jax.jit(jax.vmap(lambda x: x.sum((0, 1))))(x)
    np.testing.assert_allclose(each, x.sum((1, 2)))


@pytest.mark.parametrize("rows", [64 * 1024, 127 * 13 * 13, 512 * 511, 99991, (1 << 20) + 1])
def test_errors_are_small(rows):
    """A product adds one row after the other: of many rows, positive sums lost two digits."""
    x = 1 + np.random.default_rng(0).random((rows, 3)).astype("float32")
    np.testing.assert_allclose(jax.jit(lambda x: x.sum(0))(x), x.astype("float64").sum(0), rtol=1e-6)


def test_sums_of_too_many_rows_are_those_of_xla():
    kind = np.dtype("float32")
    assert is_replaced(jax.ShapeDtypeStruct((127 * 169, 32), kind), axes=(0,))
    assert is_replaced(jax.ShapeDtypeStruct((1 << 20, 64), kind), axes=(0,))
    assert not is_replaced(jax.ShapeDtypeStruct((99991, 32), kind), axes=(0,))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_numbers_that_are_not_finite_stay_in_their_column(value):
    x = np.ones((4096, 3), "float32")
    x[7, 1] = value
    np.testing.assert_array_equal(column_sums(x), [4096, value, 4096])


def test_sums_over_no_dimensions():
    """As in the gradient of a scalar."""
    for x in (jnp.float32(3), jnp.ones(4)):
        total = jax.jit(lambda x: jax.lax.reduce_sum(x, ()))(x)
        np.testing.assert_array_equal(total, x)
        assert not is_replaced(jax.ShapeDtypeStruct(x.shape, x.dtype), axes=())


def test_no_rows():
    empty = jax.ShapeDtypeStruct((0, 4), np.dtype("float32"))
    assert not is_replaced(empty, axes=(0,))
    np.testing.assert_array_equal(jnp.zeros((0, 4)).sum(0), np.zeros(4))
