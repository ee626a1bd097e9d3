"""What a `model_fn` may return, and the errors for what it may not."""

import jax.numpy as jnp
import keras
import pytest

import unisono
from unisono.estimator._spec import EstimatorSpec, ModeKeys
from unisono.estimator._train_op import group

TRAIN, EVAL, PREDICT = ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT


class Hook:
    def begin(self):
        pass

    before_run = after_run = end = begin


def test_a_spec_of_each_mode():
    loss = jnp.ones(())
    spec = EstimatorSpec(TRAIN, loss=loss, train_op=group(), training_hooks=[Hook()])
    assert spec.loss is loss
    assert (spec.predictions, len(spec.training_hooks)) == ({}, 1)
    metric = keras.metrics.Mean()
    assert EstimatorSpec(EVAL, None, loss, eval_metric_ops={"mean": metric}).eval_metric_ops == {
        "mean": metric
    }
    assert EstimatorSpec(PREDICT, {"a": loss}).predictions == {"a": loss}
    assert EstimatorSpec(mode=PREDICT, predictions=loss).predictions is loss


def test_a_loss_of_one_element_becomes_a_scalar():
    assert EstimatorSpec(EVAL, loss=jnp.ones((1, 1))).loss.shape == ()
    assert EstimatorSpec(EVAL, loss=1.5).loss.shape == ()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"mode": "fit"}, ValueError, "mode='fit'"),
        ({"mode": TRAIN, "train_op": group()}, ValueError, "Missing loss"),
        ({"mode": EVAL}, ValueError, "Missing loss"),
        ({"mode": TRAIN, "loss": 1.0}, ValueError, "Missing train_op"),
        ({"mode": TRAIN, "loss": jnp.ones(2), "train_op": group()}, ValueError, r"shape \(2,\)"),
        ({"mode": TRAIN, "loss": 1.0, "train_op": "op"}, TypeError, "train_op"),
        ({"mode": PREDICT}, ValueError, "Missing predictions"),
        ({"mode": PREDICT, "predictions": {"a": "text"}}, TypeError, "type str"),
        ({"mode": EVAL, "loss": 1.0, "eval_metric_ops": {"a": 3}}, TypeError, "'a'"),
        ({"mode": EVAL, "loss": 1.0, "eval_metric_ops": [3]}, TypeError, "dict"),
        ({"mode": EVAL, "loss": 1.0, "eval_metric_ops": {"global_step": 3}}, ValueError, "'global_step'"),
        ({"mode": PREDICT, "predictions": {}, "export_outputs": [3]}, TypeError, "export_outputs"),
        ({"mode": EVAL, "loss": 1.0, "training_hooks": [object()]}, TypeError, "SessionRunHook"),
        ({"mode": EVAL, "loss": 1.0, "evaluation_hooks": Hook()}, TypeError, "list of hooks"),
    ],
)
def test_errors(arguments, error, text):
    with pytest.raises(error, match=text):
        EstimatorSpec(**arguments)


@pytest.mark.parametrize("listener", ["x", unisono.estimator.CheckpointSaverListener])
def test_what_is_no_listener(listener):
    with pytest.raises(TypeError, match="CheckpointSaverListener"):
        unisono.estimator.TrainSpec(lambda: None, saving_listeners=[listener])


def test_the_package_gives_the_public_names():
    assert unisono.estimator.EstimatorSpec is EstimatorSpec
    assert {"EstimatorSpec", "ModeKeys"} <= set(dir(unisono.estimator))
    with pytest.raises(AttributeError, match="Estimatr"):
        unisono.estimator.Estimatr  # noqa: B018
