"""The derivative of max-pooling on CPUs: the bits of XLA's own, which another process computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests import forked
from unisono._lowering._pooling import replacement

pytestmark = pytest.mark.numbers

#: Input, window, strides, padding.
SHAPES = {
    "2x2": ((3, 8, 8, 4), (2, 2), (2, 2), "VALID"),
    "rows left over": ((3, 9, 11, 4), (2, 2), (2, 2), "VALID"),
    "padded": ((3, 9, 11, 4), (2, 2), (2, 2), "SAME"),
    "padded before": ((2, 9, 9, 3), (3, 3), (3, 3), ((0, 0), (2, 1), (1, 2), (0, 0))),
    "overlapping": ((3, 9, 10, 4), (3, 3), (2, 2), "SAME"),
    "every place": ((2, 7, 6, 3), (3, 2), (1, 1), "SAME"),
    "gaps between windows": ((2, 9, 9, 3), (2, 2), (3, 3), "VALID"),
    "a loop over a large window": ((2, 12, 12, 3), (7, 6), (1, 2), "SAME"),
    "a large window once": ((2, 8, 8, 3), (8, 8), (8, 8), "VALID"),
    "one dimension": ((4, 13, 5), (3,), (2,), "SAME"),
    "three dimensions": ((2, 5, 6, 4, 3), (2, 2, 2), (2, 2, 2), "SAME"),
    "one row": ((1, 2, 2, 1), (2, 2), (2, 2), "VALID"),
    "no rows": ((0, 4, 4, 2), (2, 2), (2, 2), "VALID"),
    "a window larger than the input": ((2, 3, 1, 2), (2, 4), (2, 4), "VALID"),
    "a larger window that overlaps": ((2, 3, 9, 2), (5, 2), (1, 1), "VALID"),
    "no columns": ((2, 4, 0, 2), (2, 3), (1, 2), "VALID"),
}
KINDS = ("ties", "float32", "odd numbers", "float64", "bfloat16", "min")
#: Shapes that are tried with all kinds: one for each way to compute. Others with ties.
WAYS = ("2x2", "overlapping", "a loop over a large window")


def cases():
    """Yield a name, the pooling, its input and the gradient of its output."""
    rng = np.random.default_rng(0)
    for name, (shape, window, strides, padding) in SHAPES.items():
        for kind in KINDS if name in WAYS else KINDS[:1]:
            dtype = kind if kind in ("float64", "bfloat16") else "float32"
            x = rng.normal(size=shape)
            if kind != "float32":
                x = np.round(2 * x) / 2
            if kind == "odd numbers" and x.size:
                x.flat[:: max(1, x.size // 7)] = np.nan
                x.flat[1 :: max(1, x.size // 5)] = -np.inf
                x.flat[2 :: max(1, x.size // 6)] = -0.0
            x = jnp.asarray(x, dtype)
            infinity, choose = (np.inf, lax.min) if kind == "min" else (-np.inf, lax.max)
            pool = functools.partial(
                lax.reduce_window,
                init_value=np.array(infinity, x.dtype)[()],
                computation=choose,
                window_dimensions=(1, *window, 1),
                window_strides=(1, *strides, 1),
                padding=padding,
            )
            weights = jnp.asarray(rng.normal(size=jax.eval_shape(pool, x).shape), dtype)
            yield f"{name}, {kind}", pool, x, weights


def gradient(pool, x, weights):
    return jax.jit(lambda x, w: jax.vjp(pool, x)[1](w)[0])(x, weights)


def computed():
    with jax.enable_x64(True):
        return {name: np.asarray(gradient(*case), "float64") for name, *case in cases()}


@pytest.fixture(scope="module")
def xla(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pooling")
    (folder / "xla.py").write_text(
        f"import sys; sys.path.insert(0, {str(forked.REPOSITORY)!r})\n"
        "import numpy, unisono; from tests.virtual.test_pooling import computed\n"
        "with unisono.OneDeviceStrategy('cpu:0').scope():\n"
        "    numpy.savez('xla.npz', **computed())\n"
    )
    done = forked.run(["xla.py"], folder, env=forked.environment(UNISONO_MAX_POOLING="xla"))
    assert done.returncode == 0, done.stderr
    return np.load(folder / "xla.npz")


def test_same_bits(xla):
    import unisono

    with unisono.OneDeviceStrategy("cpu:0").scope():
        found = computed()
    assert found.keys() == set(xla.files)
    for name, value in found.items():
        np.testing.assert_array_equal(value, xla[name], err_msg=name)


def test_it_is_in_use():
    """A program with max-pooling holds no scatter, under `vmap` neither."""
    pool = functools.partial(
        lax.reduce_window, init_value=-np.inf, computation=lax.max, window_dimensions=(1, 2),
        window_strides=(1, 2), padding="VALID",
    )  # fmt: skip
    x, weights = jnp.zeros((3, 4, 6)), jnp.ones((3, 4, 3))
    each = jax.vmap(lambda x, w: jax.vjp(pool, x)[1](w)[0])
    assert "select_and_scatter" not in jax.jit(each).lower(x, weights).as_text()
    np.testing.assert_array_equal(each(x, weights)[..., ::2], weights)


def test_integers():
    """No gradient flows through integers, but the primitive takes them."""
    found = replacement(
        jnp.array([1, 10]), jnp.array([3, 3, -7, -5, 9]), select_prim=lax.ge_p,
        window_dimensions=(3,), window_strides=(2,), padding=[(0, 0)],
    )  # fmt: skip
    assert found.tolist() == [1, 0, 0, 0, 10]
