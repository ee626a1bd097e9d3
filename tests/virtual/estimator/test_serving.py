"""`export_saved_model`: the artefact of an Estimator gives its predictions, without the model_fn."""

import keras
import numpy as np
import pytest

import unisono
from unisono import estimator as tf_estimator
from unisono.estimator import Estimator, EstimatorSpec, ModeKeys
from unisono.estimator._train_op import minimize

X, Y = np.arange(12, dtype="float32").reshape(6, 2), np.ones((6, 1), "float32")


def model_fn(features, labels, mode):
    output = keras.layers.Dense(1)(features["x"])
    outputs = {
        "serving_default": tf_estimator.RegressionOutput(output),
        "other": tf_estimator.ClassificationOutput(scores=output),
    }
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, {"output": output}, export_outputs=outputs)
    loss = keras.ops.mean((output - labels) ** 2)
    return EstimatorSpec(mode, loss=loss, train_op=minimize(keras.optimizers.SGD(0.001), loss))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    estimator = Estimator(model_fn, tmp_path_factory.mktemp("model"))
    return estimator.train(lambda: ({"x": X}, Y), steps=2)


def predictions(trained):
    return np.stack([p["output"] for p in trained.predict(lambda: iter([({"x": X}, None)]))])


def test_an_artefact_gives_the_predictions(trained, tmp_path):
    receiver_fn = tf_estimator.build_raw_serving_input_receiver_fn({"x": X[:1]})
    paths = [trained.export_saved_model(tmp_path, receiver_fn) for _ in range(2)]
    assert paths[0] != paths[1]
    served = unisono.export.load(paths[0])
    np.testing.assert_allclose(served({"x": X})["outputs"], predictions(trained), rtol=1e-5)
    assert served({"x": X[:2]})["outputs"].shape == (2, 1)


def test_features_may_be_made_of_what_is_received(trained, tmp_path):
    def receiver_fn():
        raw = keras.KerasTensor((None, 2), "float32")
        return tf_estimator.ServingInputReceiver({"x": raw * 2.0}, {"half": raw})

    path = trained.experimental_export_all_saved_models(tmp_path, {ModeKeys.PREDICT: receiver_fn})
    found = unisono.export.load(path)({"half": X / 2})["outputs"]
    np.testing.assert_allclose(found, predictions(trained), rtol=1e-5)


def test_errors(trained, tmp_path):
    with pytest.raises(TypeError, match="ServingInputReceiver"):
        trained.export_saved_model(tmp_path, lambda: 3)
    with pytest.raises(ValueError, match="predictions alone"):
        trained.experimental_export_all_saved_models(tmp_path, {"train": lambda: 3})
    with pytest.raises(NotImplementedError, match=r"tf\.Examples"):
        tf_estimator.build_parsing_serving_input_receiver_fn({})
    with pytest.raises(OSError, match="Could not find trained model"):
        Estimator(model_fn).export_saved_model(tmp_path, lambda: 3)
