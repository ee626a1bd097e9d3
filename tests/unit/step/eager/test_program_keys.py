"""Keys of operations: equal for equal programs, whatever objects JAX has made for them."""

import jax
import jax.numpy as jnp
import pytest

from unisono.step.eager._program_keys import HasFunctionsError, derivative_key, operation_key


def scan_of(factor, activation=jnp.tanh):
    def body(carry, _):
        return activation(carry * factor), None

    closed = jax.make_jaxpr(lambda x: jax.lax.scan(body, x, None, length=3))(1.0)
    (eqn,) = [e for e in closed.eqns if e.primitive.name == "scan"]
    return eqn


def test_bodies_that_are_made_anew_are_equal():
    first, again, other = scan_of(2.0), scan_of(2.0), scan_of(3.0)
    keys = [operation_key(e.primitive, e.params) for e in (first, again, other)]
    assert keys[0] == keys[1]
    assert hash(keys[0]) == hash(keys[1])
    assert keys[0] != keys[2]


def test_functions_have_no_key():
    eqn = scan_of(2.0, jax.nn.relu)
    with pytest.raises(HasFunctionsError):
        operation_key(eqn.primitive, eqn.params)


def test_a_derivative_has_applied_the_rules_of_its_functions():
    def key(activation):
        return derivative_key(jax.make_jaxpr(lambda x: activation(x) * 2)(1.0))

    assert key(jax.nn.relu) == key(jax.nn.relu) != key(jax.nn.relu6)


def test_shapes_and_types_count():
    def key(x):
        return derivative_key(jax.make_jaxpr(lambda a: a * 2)(x))

    assert key(jnp.ones(3)) == key(jnp.ones(3))
    assert key(jnp.ones(3)) != key(jnp.ones(4))
    assert key(jnp.ones(3)) != key(jnp.ones(3, "float16"))
