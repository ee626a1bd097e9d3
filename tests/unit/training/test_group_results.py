"""Predictions of several steps, on their way to the host."""

import jax.numpy as jnp
import numpy as np
import pytest

from unisono.training.groups._batch_source import GroupPredictions


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
