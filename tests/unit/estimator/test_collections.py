"""What a model_fn collects belongs to one run of it."""

import jax.numpy as jnp
import pytest

import unisono
from unisono.estimator._collections import (
    current_collections,
    fetch_in_all_runs,
    identity,
    key_of,
    required_collections,
    unique_name,
)
from unisono.estimator._train_op import ModelCall, entered_call


@pytest.fixture
def call():
    with entered_call(ModelCall("train", None, None)) as call:
        yield call


def test_outside_of_a_model_fn():
    assert current_collections() is None
    assert unique_name("dense") == "dense" == unique_name("dense")
    with pytest.raises(unisono.ContextError, match="get_losses"):
        required_collections("get_losses")


def test_names_are_unique_in_a_run(call):
    assert [unique_name("a") for _ in range(3)] == ["a", "a_1", "a_2"]
    assert unique_name("a_1") == "a_1_1"
    with entered_call(ModelCall("train", None, None)):
        assert unique_name("a") == "a"


def test_a_named_value(call):
    x = jnp.arange(3.0)
    named = identity(x, name="x")
    assert call.exposed["x"] is named
    assert key_of(call.exposed, named) == "x"
    assert key_of(call.exposed, x) is None
    identity(x)
    assert list(call.exposed) == ["x"]
    with pytest.raises(unisono.InvalidArgumentError, match="name='x'"):
        identity(x, name="x")


def test_a_hook_asks_by_names_that_are_equal_in_all_runs(call):
    loss = identity(jnp.float32(1), "loss")
    other = jnp.float32(2)
    first = [fetch_in_all_runs(t, "logged") for t in (loss, other, other, "name")]
    assert first == ["loss", "_logged", "_logged", "name"]
    assert call.exposed["_logged"] is other
    with entered_call(ModelCall("train", None, None)):
        loss, other = identity(jnp.float32(3), "loss"), jnp.float32(4)
        assert [fetch_in_all_runs(t, "logged") for t in (loss, other, other, "name")] == first
