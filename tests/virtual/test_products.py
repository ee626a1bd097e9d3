"""Products over several dimensions on CPUs: equal to XLA's own lowering, and without its transpositions."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import unisono
from unisono._lowering._products import is_merged, replacement

pytestmark = pytest.mark.numbers

#: Shapes of both operands, contracted dimensions of both.
MERGED = {
    "a dense layer's kernel": ((4, 5, 6), (4, 5, 7), ((0, 1), (0, 1))),
    "an attention's kernel": ((4, 5, 6), (4, 5, 2, 3), ((0, 1), (0, 1))),
    "heads are contracted": ((4, 5, 2, 3), (6, 2, 3), ((2, 3), (1, 2))),
    "pairs in another order": ((4, 5, 6), (4, 5, 7), ((1, 0), (1, 0))),
    "everything": ((4, 5), (4, 5), ((0, 1), (0, 1))),
    "three dimensions": ((2, 3, 4, 5), (7, 2, 3, 4), ((0, 1, 2), (1, 2, 3))),
    "sizes of one": ((1, 5, 1), (1, 5, 7), ((0, 1), (0, 1))),
}
OTHERS = {
    "one dimension": ((4, 5, 6), (6, 7), ((2,), (0,)), ((), ())),
    "a batch dimension": ((2, 4, 5, 6), (2, 4, 5, 7), ((1, 2), (1, 2)), ((0,), (0,))),
    "not side by side": ((4, 6, 5), (4, 7, 5), ((0, 2), (0, 2)), ((), ())),
    "in different orders": ((4, 5, 6), (5, 4, 7), ((0, 1), (1, 0)), ((), ())),
    "free dimensions on both sides": ((6, 4, 5, 2), (4, 5, 7), ((1, 2), (0, 1)), ((), ())),
    "empty": ((0, 5, 6), (0, 5, 7), ((0, 1), (0, 1)), ((), ())),
}


@pytest.fixture(autouse=True, scope="module")
def _installed():
    with unisono.OneDeviceStrategy("cpu:0").scope():
        yield


def operands(case, dtype="float32"):
    rng = np.random.default_rng(0)
    # Small integers: every order of the sums gives the same bits.
    return [jnp.asarray(rng.integers(-3, 4, shape), dtype) for shape in case[:2]]


def product(contracted, batch=((), ())):
    return functools.partial(lax.dot_general, dimension_numbers=(contracted, batch))


def expected(case, x, y):
    return np.tensordot(np.asarray(x, "float64"), np.asarray(y, "float64"), case[2])


@pytest.mark.parametrize("name", MERGED)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int32"])
def test_equal(name, dtype):
    case = MERGED[name]
    with jax.enable_x64(dtype == "float64"):
        x, y = operands(case, dtype)
        assert is_merged(x, y, dimension_numbers=(case[2], ((), ())))
        found = jax.jit(product(case[2]))(x, y)
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found, "float64"), expected(case, x, y))


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name):
    case = OTHERS[name]
    x, y = operands(case)
    assert not is_merged(x, y, dimension_numbers=case[2:])
    found = jax.jit(product(*case[2:]))(x, y)
    with jax.disable_jit():
        shape = jax.eval_shape(product(*case[2:]), x, y).shape
    assert found.shape == shape


def test_wider_result_and_precision():
    case = MERGED["a dense layer's kernel"]
    x, y = operands(case, "bfloat16")
    wide = functools.partial(product(case[2]), preferred_element_type="float32", precision="highest")
    found = jax.jit(wide)(x, y)
    assert found.dtype == "float32"
    np.testing.assert_array_equal(found, expected(case, x, y))


def test_transformations():
    """Under `vmap`, `scan`, first and second derivatives, forwards and backwards."""
    case = MERGED["a dense layer's kernel"]
    x, y = operands(case)
    dot, own = product(case[2]), functools.partial(jnp.einsum, "abm,abn->mn")
    many = jnp.stack([x, 2 * x])
    np.testing.assert_array_equal(
        jax.jit(jax.vmap(dot, (0, None)))(many, y), jnp.stack([own(x, y), 2 * own(x, y)])
    )
    _, found = jax.jit(lambda m: lax.scan(lambda c, v: (c, dot(v, y)), 0, m))(many)
    np.testing.assert_array_equal(found, jnp.stack([own(x, y), 2 * own(x, y)]))

    def loss(dot, x):
        return (dot(x, y) ** 2).sum()

    def sums(a, b):
        return (a[..., None] * b[..., None, :]).sum((0, 1))

    for transform in (jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))[1], jax.hessian):
        result, with_sums = (jax.jit(transform(functools.partial(loss, f)))(x) for f in (dot, sums))
        np.testing.assert_array_equal(result, with_sums)


def lowered(function, *arguments):
    return jax.jit(function).lower(*arguments).as_text()


def contractions(text):
    return re.findall(r"contracting_dims = (\[.*?\] x \[.*?\])", text)


def test_program_has_matrix_products():
    """The gradient of a dense layer's kernel, also in a loop and in a replica."""
    x, w = jnp.ones((8, 5, 6)), jnp.ones((6, 7))

    def gradient(x, w):
        return jax.grad(lambda w: jnp.sin(x @ w).sum())(w)

    assert "[0] x [0]" in contractions(lowered(gradient, x, w))
    assert not [c for c in contractions(lowered(gradient, x, w)) if "," in c]
    loop = lowered(lambda x, w: lax.fori_loop(0, 3, lambda _, w: w - gradient(x, w), w), x, w)
    assert not [c for c in contractions(loop) if "," in c]
    mesh = Mesh(jax.devices()[:2], "replica")
    step = jax.shard_map(
        lambda x, w: lax.psum(gradient(x, w), "replica"),
        mesh=mesh,
        in_specs=(P("replica"), P()),
        out_specs=P(),
        check_vma=False,
    )
    assert not [c for c in contractions(lowered(step, x, w)) if "," in c]
    np.testing.assert_allclose(jax.jit(step)(x, w), jax.jit(gradient)(x, w), rtol=1e-6)


def test_programs_that_xla_distributes_stay():
    mesh = Mesh(jax.devices()[:2], "model")
    x = jax.device_put(jnp.ones((4, 6, 5)), NamedSharding(mesh, P(None, "model")))
    text = lowered(product(((0, 1), (0, 1))), x, x)
    assert contractions(text) == ["[0, 1] x [0, 1]"]


def test_merged_function_alone():
    case = MERGED["heads are contracted"]
    x, y = operands(case)
    found = replacement(x, y, dimension_numbers=(case[2], ((), ())))
    np.testing.assert_array_equal(found, expected(case, x, y))


def test_dimensions_apart():
    case = OTHERS["not side by side"]
    x, y = operands(case)
    with pytest.raises(ValueError, match="side by side"):
        replacement(x, y, dimension_numbers=case[2:])
