"""What results depend on, the part of a program that they need, and its bytes."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import unisono
from unisono.training._jaxprs import dependencies, exported, is_argument, pruned


def masks(fn, *args):
    return [f"{m:b}" for m in dependencies(jax.make_jaxpr(fn)(*args))]


def test_calls_and_branches_are_looked_into():
    called = jax.jit(lambda a, b: (a + 1, b))
    assert masks(lambda x, y, z: [*called(x, y), z], 1.0, 2.0, 3.0) == ["1", "10", "100"]

    def branches(flag, x, y):
        return jax.lax.cond(flag, lambda: (x, y * 2), lambda: (x + 1, y))

    assert masks(branches, True, 1.0, 2.0) == ["11", "101"]
    assert masks(lambda x, y: (jax.nn.relu(x), jax.checkpoint(jnp.sin)(y)), 1.0, 2.0) == ["1", "10"]


def test_a_loop_mixes_what_it_carries():
    def loop(x, y):
        return jax.lax.fori_loop(0, 3, lambda _, c: (c[1], c[0]), (x, y))

    assert masks(loop, 1.0, 2.0) == ["11", "11"]


def test_unused_arguments_and_constants_are_dropped():
    large = np.arange(1000.0, dtype="float32")
    closed = jax.make_jaxpr(lambda x, y: (x + 1, jnp.sum(jnp.asarray(large) * y)))(1.0, 2.0)
    first, used = pruned(closed, [True, False])
    assert used == [0]
    assert not first.consts
    second, used = pruned(closed, [False, True])
    assert used == [1]
    assert len(second.consts) == len(closed.consts)
    assert is_argument(jax.make_jaxpr(lambda x, y: (y, x + 1))(1.0, 2.0), 0, 1)


def test_a_program_is_the_same_after_its_bytes():
    spec = jax.ShapeDtypeStruct((3,), jnp.float32)
    blob = exported(lambda x, y: [x @ y, x - y], [spec, spec])
    x = np.arange(3, dtype="float32")
    product, difference = jax.export.deserialize(bytearray(blob)).call(x, x)
    assert float(product) == 5
    assert not difference.any()


def test_a_program_cannot_call_python():
    spec = jax.ShapeDtypeStruct((), jnp.float32)

    def printing(x):
        jax.debug.print("{}", x)
        return [x]

    def calling(x):
        return [jax.pure_callback(np.sin, spec, x)]

    for fn in (printing, calling):
        with pytest.raises(unisono.UnsupportedError, match="must not call Python"):
            exported(fn, [spec])
