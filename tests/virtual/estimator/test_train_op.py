"""Updates that a `model_fn` asks for, without an Estimator around it."""

import jax.numpy as jnp
import keras
import pytest

from unisono import ContextError
from unisono.estimator import _train_op as train_op


def test_groups_reach_each_update_once():
    optimizer, variable = keras.optimizers.SGD(0.1), keras.Variable(1.0)
    first = train_op.apply_gradients(optimizer, [(jnp.ones(()), variable)])
    second = train_op.apply_gradients(optimizer, [(jnp.ones(()), variable)], variable)
    every = train_op.group(first, train_op.group(second, jnp.ones(())), [first])
    call = train_op.ModelCall("train", None, None)
    assert train_op.train_ops_of(every, call) == [first, second]
    assert train_op.train_ops_of(train_op.group(), call) == []
    assert all(map(train_op.is_train_op, [first, every, [first, second], variable, jnp.ones(())]))
    assert not any(map(train_op.is_train_op, [None, "op", [], 3]))


def test_an_update_needs_a_gradient():
    with pytest.raises(ValueError, match="No gradients provided"):
        train_op.apply_gradients(keras.optimizers.SGD(0.1), [(None, keras.Variable(1.0))])


@pytest.mark.parametrize(
    "call",
    [
        lambda: train_op.minimize(keras.optimizers.SGD(0.1), jnp.ones(())),
        lambda: train_op.ambient_gradients(jnp.ones(()), [keras.Variable(1.0)]),
        train_op.get_global_step,
        lambda: train_op.expose("a", jnp.ones(())),
    ],
)
def test_by_hand_there_is_an_error(call):
    with pytest.raises(ContextError, match="Estimator runs"):
        call()
