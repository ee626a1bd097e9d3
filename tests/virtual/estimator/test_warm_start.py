"""`WarmStartSettings`: which variables begin with the values of another training."""

import keras
import numpy as np
import pytest

import unisono
from unisono.estimator import Estimator, EstimatorSpec, RunConfig, WarmStartSettings
from unisono.estimator._train_op import minimize

X, Y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")


def model_fn(features, labels, mode, params):
    hidden = keras.layers.Dense(params["units"], name=params["name"])(features)
    output = keras.layers.Dense(1, name="out")(hidden)
    loss = keras.ops.mean((output - labels) ** 2)
    # Nothing changes: what is saved is what training began with.
    return EstimatorSpec(mode, loss=loss, train_op=minimize(keras.optimizers.SGD(0.0), loss))


def train(start, units=3, name="hidden"):
    config = RunConfig(save_summary_steps=0, log_step_count_steps=None)
    estimator = Estimator(
        model_fn, config=config, params={"units": units, "name": name}, warm_start_from=start
    )
    return estimator.train(lambda: (X, Y), steps=1)


@pytest.fixture(scope="module")
def source():
    return train(None)


def test_all_trainable_variables(source):
    for start in (source.model_dir, source.latest_checkpoint(), WarmStartSettings(source.model_dir)):
        found = train(start)
        for name in ("hidden/kernel", "out/kernel"):
            np.testing.assert_array_equal(found.get_variable_value(name), source.get_variable_value(name))
        assert found.get_variable_value("global_step") == 1


def test_some_variables_and_other_names(source):
    settings = WarmStartSettings(source.model_dir, ["other/.*"], None, {
        "other/kernel": "hidden/kernel", "other/bias": "hidden/bias",
    })  # fmt: skip
    found = train(settings, name="other")
    np.testing.assert_array_equal(
        found.get_variable_value("other/kernel"), source.get_variable_value("hidden/kernel")
    )
    assert (found.get_variable_value("out/kernel") != source.get_variable_value("out/kernel")).any()


def test_errors(source):
    with pytest.raises(ValueError, match="'other/kernel', which is not in"):
        train(source.model_dir, name="other")
    with pytest.raises(ValueError, match=r"shape \(2, 4\), which is \(2, 3\)"):
        train(source.model_dir, units=4)
    with pytest.raises(NotImplementedError, match="var_name_to_vocab_info"):
        WarmStartSettings(source.model_dir, ".*", {"a": 1})
    with pytest.raises(TypeError, match="warm_start_from"):
        train(3)
    assert issubclass(unisono.CheckpointMismatchError, ValueError)
