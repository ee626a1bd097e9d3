"""What a `model_fn` and an `input_fn` may be, and the errors for what they may not."""

import functools

import keras
import numpy as np
import pytest

from unisono.data import Dataset
from unisono.estimator import Estimator, EstimatorSpec, ModeKeys, RunConfig
from unisono.estimator._train_op import minimize

X, Y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")


def model_fn(features, labels, mode):
    output = keras.layers.Dense(1)(features)
    loss = keras.ops.mean((output - labels) ** 2)
    return EstimatorSpec(mode, loss=loss, train_op=minimize(keras.optimizers.SGD(0.1), loss))


def train(function, input_fn=lambda: Dataset.from_tensor_slices((X, Y)).batch(4), steps=2, **arguments):
    config = RunConfig(save_checkpoints_secs=None, save_summary_steps=0, log_step_count_steps=None)
    return Estimator(function, config=config, **arguments).train(input_fn, steps=steps)


def test_arguments_are_given_by_name():
    seen = []

    def of_all(mode, params, labels, config, features):
        seen.append((mode, params, config.task_type, labels.shape))
        return model_fn(features, labels, mode)

    def input_fn(params, mode, config, input_context):
        seen.append((params, mode, config.task_id, input_context.num_replicas_in_sync))
        return Dataset.from_tensor_slices((X, Y)).batch(4)

    train(of_all, input_fn, params={"a": 1})
    assert seen[0] == ({"a": 1}, "train", 0, 1)
    assert seen[1] == ("train", {"a": 1}, "worker", (4, 1))


def test_without_labels_and_with_partial_arguments():
    seen = []

    def of_features(features, mode, scale):
        seen.append((features["x"].shape, mode, scale))
        return model_fn(features["x"], scale, mode)

    def input_fn():
        return Dataset.from_tensor_slices({"x": X}).batch(4)

    train(functools.partial(of_features, scale=1.0), input_fn)
    assert set(seen) == {((4, 2), "train", 1.0)}


def test_arrays_are_the_same_in_each_step(tmp_path):
    def descent(features, labels, mode):
        output = keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)(features)
        loss = keras.ops.mean((output - labels) ** 2)
        return EstimatorSpec(mode, loss=loss, train_op=minimize(keras.optimizers.SGD(0.1), loss))

    # Each step leaves 0.6 of the error of the two weights' sum, whose target is 1.
    estimator = Estimator(descent, tmp_path, RunConfig(save_summary_steps=0, log_step_count_steps=None))
    kernel = estimator.train(lambda: (X, Y), steps=5).get_variable_value("dense/kernel")
    np.testing.assert_allclose(kernel, np.full((2, 1), (1 - 0.6**5) / 2), rtol=1e-5)


@pytest.mark.parametrize(
    ("function", "arguments", "error", "text"),
    [
        (None, {}, ValueError, "model_fn must be provided"),
        (3, {}, TypeError, "model_fn"),
        (lambda labels, mode: None, {}, ValueError, "must include features"),
        (lambda features, mode: None, {"params": {}}, ValueError, "does not include params"),
        (lambda features, other: None, {}, ValueError, r"not expected args: \['other'\]"),
        (model_fn, {"config": {}}, TypeError, "instance of `RunConfig`"),
        (model_fn, {"model_dir": ""}, ValueError, "non-empty"),
        (model_fn, {"model_dir": "a", "config": RunConfig("b")}, ValueError, "different values"),
    ],
)
def test_errors_of_the_constructor(function, arguments, error, text):
    with pytest.raises(error, match=text):
        Estimator(function, **arguments)


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (lambda features, labels: 3, ValueError, "should return an EstimatorSpec"),
        (lambda features: model_fn(features, 1.0, "train"), ValueError, "needs an argument for them"),
        (
            lambda features, labels: EstimatorSpec("infer", predictions=features),
            ValueError,
            "mode that it got",
        ),
    ],
)
def test_errors_of_model_fn(function, error, text):
    with pytest.raises(error, match=text):
        train(function)


@pytest.mark.parametrize(
    ("input_fn", "text"),
    [
        (lambda: None, "must return data"),
        (lambda: Dataset.from_tensor_slices((X, Y)).take(0).batch(2), "at least one element"),
        (lambda: (X, Y, Y), "len 2 tuple"),
        (lambda: (np.array(["a"]), Y), "cannot hold strings"),
    ],
)
def test_errors_of_input_fn(input_fn, text):
    with pytest.raises((ValueError, TypeError), match=text):
        train(model_fn, input_fn)


def test_a_checkpoint_of_another_model_is_an_error(tmp_path):
    config = RunConfig(save_summary_steps=0, log_step_count_steps=None)
    Estimator(model_fn, tmp_path, config).train(lambda: (X, Y), steps=1)

    def other(features, labels, mode):
        return model_fn(keras.layers.Dense(3, name="more")(features), labels, mode)

    with pytest.raises(ValueError, match=r"without \['more/bias', 'more/kernel'\]"):
        Estimator(other, tmp_path, config).train(lambda: (X, Y), steps=1)
    with pytest.raises(ValueError, match=r"'dense/kernel' of shape \(2, 1\)"):
        Estimator(model_fn, tmp_path, config).train(lambda: (X[:, :1], Y), steps=1)


def test_the_learning_rate_is_that_of_the_program(tmp_path):
    rates = []

    def of_rate(features, labels, mode, params):
        output = keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)(features)
        loss = keras.ops.mean(output)
        return EstimatorSpec(mode, loss=loss, train_op=minimize(keras.optimizers.SGD(params["rate"]), loss))

    for rate in (0.5, 0.25):
        estimator = Estimator(of_rate, tmp_path, params={"rate": rate})
        rates.append(estimator.train(lambda: (X, Y), steps=1).get_variable_value("dense/kernel")[0, 0])
    np.testing.assert_allclose(rates, [-0.5, -0.75])
    assert ModeKeys.TRAIN == "train"
