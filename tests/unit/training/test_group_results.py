"""Predictions of several steps, on their way to the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unisono.training.groups._batch_source import GroupPredictions, GroupResult
from unisono.training.groups._multi_step import LazyArray


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_each_step_has_its_rows(dtype):
    group = GroupPredictions((jnp.arange(24, dtype=dtype).reshape(4, 3, 2), {"b": jnp.ones((4, 3))}), count=3)
    steps = group.steps()
    assert len(steps) == 3
    for i, (first, others) in enumerate(steps):
        np.testing.assert_array_equal(np.asarray(first), np.arange(6 * i, 6 * i + 6).reshape(3, 2))
        assert np.asarray(first).dtype == jnp.dtype(dtype)
        assert np.concatenate([others["b"], others["b"]]).shape == (6,)


def test_what_is_fetched_is_no_longer_on_the_devices():
    array = jnp.ones((2, 4))
    group = GroupPredictions(array, count=2)
    first, _ = group.steps()
    group.fetch()
    array.delete()
    np.testing.assert_array_equal(np.asarray(first), np.ones(4))


def test_steps_are_read_where_they_are_used_without_a_fetch_before():
    step = GroupPredictions({"y": jnp.array([[1.0], [2.0]])}, count=2).steps()[1]
    assert np.asarray(step["y"], "float64").tolist() == [2.0]


@pytest.mark.parametrize("is_stacked", [False, True])
def test_logs_of_numbers_are_read_where_keras_asks(is_stacked):
    """Without a program that picks the last step's number, and without JAX's slow `float(array)`."""
    loss = jnp.array([0.5, 1.5, 0.0]) if is_stacked else jnp.array(1.5)
    logs = GroupResult({"loss": loss}, 2 if is_stacked else 1, is_stacked).newest()
    assert type(logs["loss"]) is LazyArray
    assert float(logs["loss"]) == 1.5
    assert (logs["loss"].shape, logs["loss"].dtype) == ((), "float32")
    assert float(logs["loss"].value) == 1.5


def test_an_error_of_a_step_is_raised_where_its_logs_are_waited_for():
    def fails():
        raise OSError("the device is gone")

    with pytest.raises(OSError, match="the device is gone"):
        jax.block_until_ready({"loss": LazyArray(fails, None)})
