"""Losses give TensorFlow's numbers and gradients, as recorded in tensorflow_v1_results.json."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.tensorflow_v1_results import CASES, RESULTS, values

import unisono
from unisono.estimator import losses
from unisono.estimator._train_op import ModelCall, entered_call

WANTED = json.loads(RESULTS.read_text())["losses"]


@pytest.mark.parametrize("expression", CASES["losses"])
def test_as_tensorflow(expression):
    own = {"R": losses.Reduction, "losses": losses, **values()}
    given = [own[n] for n in ("A", "B", "P")]

    def loss(given):
        return eval(f"losses.{expression}", {**own, **dict(zip("ABP", given, strict=True))})

    grads = jax.grad(lambda given: jnp.sum(loss(given)))(given)
    value, *wanted = WANTED[expression]
    np.testing.assert_allclose(loss(given), value, rtol=2e-6, atol=1e-7)
    # TensorFlow has no gradient for what a loss does not use.
    used, kept = [g for g in grads if np.any(g)], [w for w in wanted if np.any(w)]
    for grad, gradient in zip(used, kept, strict=True):
        np.testing.assert_allclose(grad, gradient, rtol=2e-5, atol=1e-6)


def test_a_label_that_is_no_class_gives_nan():
    logits = np.zeros((2, 3), "float32")
    for label in (3, -1):
        assert np.isnan(losses.sparse_softmax_cross_entropy([0, label], logits))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_floats_are_added_up_in_long_ones(dtype):
    elements = jnp.full((4096,), 1.0, dtype)
    assert losses.compute_weighted_loss(elements).dtype == dtype
    assert float(losses.compute_weighted_loss(elements)) == 1.0
    assert losses.softmax_cross_entropy(jnp.eye(2), jnp.eye(2, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: losses.mean_squared_error(np.zeros((2, 1)), np.zeros(2)), r"\(2, 1\) and \(2,\)"),
        (lambda: losses.mean_squared_error(None, np.zeros(2)), "labels"),
        (lambda: losses.hinge_loss(np.zeros(2), None), "logits"),
        (lambda: losses.mean_squared_error(np.zeros((2, 3)), np.zeros((2, 3)), np.ones(2)), "weights"),
        (lambda: losses.mean_squared_error(np.zeros(2), np.zeros(2), np.ones(3)), "weights"),
        (lambda: losses.compute_weighted_loss([1.0], reduction="mean"), "reduction"),
        (lambda: losses.cosine_distance(np.zeros(2), np.zeros(2)), "axis"),
        (lambda: losses.sparse_softmax_cross_entropy([0.5], np.zeros((1, 3))), "whole numbers"),
        (lambda: losses.sparse_softmax_cross_entropy([[0, 1]], np.zeros((1, 3))), "whole numbers"),
    ],
)
def test_mistakes(call, match):
    with pytest.raises(unisono.InvalidArgumentError, match=match):
        call()


# --- collections -----------------------------------------------------------------------------------


def test_losses_of_a_model_fn_add_up():
    with entered_call(ModelCall("train", None, None)):
        assert losses.get_losses() == []
        with pytest.raises(unisono.InvalidArgumentError, match="a loss to add up"):
            losses.get_total_loss()
        first = losses.mean_squared_error([1.0], [2.0])
        losses.mean_squared_error([1.0], [4.0], loss_collection=None)
        other = losses.mean_squared_error([1.0], [4.0], loss_collection="other")
        losses.add_loss(jnp.float32(3))
        assert losses.get_losses() == [first, 3.0]
        assert losses.get_losses(loss_collection="other") == [other]
        assert float(losses.get_total_loss()) == 4.0
        assert losses.get_regularization_losses() == []
        assert float(losses.get_regularization_loss()) == 0.0
        with pytest.raises(unisono.UnsupportedError, match="scope"):
            losses.get_losses("dense")
    losses.add_loss(jnp.float32(1))
    with pytest.raises(unisono.ContextError, match="get_losses"):
        losses.get_losses()
