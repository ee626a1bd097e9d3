"""`Estimator.evaluate` and `Estimator.predict`, against NumPy."""

import keras
import numpy as np
import pytest

import unisono
from unisono.data import Dataset
from unisono.estimator import Estimator, EstimatorSpec, ModeKeys, RunConfig
from unisono.estimator._train_op import minimize

RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 3)).astype("float32")
Y = RNG.normal(size=(22, 1)).astype("float32")


def model_fn(features, labels, mode, params):
    output = keras.layers.Dense(1, name="out")(features)
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions={"output": output, "twice": 2 * output, "sum": output.sum()})
    loss = keras.losses.MeanSquaredError()(labels, output)
    metric = keras.metrics.MeanAbsoluteError(name="mae")
    metric.update_state(labels, output)
    return EstimatorSpec(
        mode, loss=loss, eval_metric_ops={"mae": metric},
        train_op=minimize(keras.optimizers.SGD(params["rate"]), loss),
    )  # fmt: skip


def data(batch, x=X, y=Y):
    return lambda: Dataset.from_tensor_slices((x, y)).batch(batch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    config = RunConfig(tf_random_seed=1, save_checkpoints_steps=3)
    estimator = Estimator(model_fn, tmp_path_factory.mktemp("model"), config, {"rate": 0.1})
    return estimator.train(data(4))


def outputs(estimator, path=None):
    values = unisono.checkpoint.load_checkpoint(path or estimator.latest_checkpoint())
    return X @ values.get_tensor("out/kernel") + values.get_tensor("out/bias")


def test_results_are_those_of_all_data(trained):
    losses = [np.mean((outputs(trained)[i : i + 8] - Y[i : i + 8]) ** 2) for i in range(0, 22, 8)]
    mirrored = Estimator(
        model_fn, trained.model_dir, RunConfig(eval_distribute=unisono.MirroredStrategy(["cpu:0", "cpu:1"])),
        {"rate": 0.1},
    )  # fmt: skip
    for estimator, batch in ((trained, 8), (mirrored, 4)):
        found = estimator.evaluate(data(batch))
        assert found["global_step"] == 6
        np.testing.assert_allclose(found["loss"], np.mean(losses), rtol=1e-5)
        np.testing.assert_allclose(found["mae"], np.abs(outputs(trained) - Y).mean(), rtol=1e-5)
        assert set(found) == {"loss", "mae", "global_step"}


def test_some_steps_and_another_checkpoint(trained):
    path = unisono.checkpoint.latest_checkpoint(trained.model_dir).removesuffix("-6") + "-3"
    found = trained.evaluate(data(4), steps=2, checkpoint_path=path, name="some")
    assert found["global_step"] == 3
    np.testing.assert_allclose(found["mae"], np.abs(outputs(trained, path) - Y)[:8].mean(), rtol=1e-5)
    assert trained.eval_dir("some") == f"{trained.model_dir}/eval_some"


def test_predictions_one_by_one_and_in_batches(trained):
    keys = ["output", "twice"]
    found = list(trained.predict(data(8), predict_keys=keys))
    np.testing.assert_allclose([p["output"] for p in found], outputs(trained), rtol=1e-5)
    np.testing.assert_allclose([p["twice"] for p in found], 2 * outputs(trained), rtol=1e-5)
    batches = list(
        trained.predict(lambda: Dataset.from_tensor_slices(X).batch(8), yield_single_examples=False)
    )
    assert [b["output"].shape for b in batches] == [(8, 1), (8, 1), (6, 1)]
    np.testing.assert_allclose(batches[0]["sum"], outputs(trained)[:8].sum(), rtol=1e-5)
    with pytest.raises(ValueError, match="Batch length of predictions should be same"):
        list(trained.predict(data(8)))
    with pytest.raises(ValueError, match="at least one output"):
        list(trained.predict(data(8), predict_keys="other"))


def test_without_a_checkpoint_initial_values_are_used(tmp_path):
    estimator = Estimator(model_fn, tmp_path, RunConfig(tf_random_seed=1), {"rate": 0.1})
    assert estimator.evaluate(data(22))["global_step"] == 0
    assert len(list(estimator.predict(data(22), predict_keys="output"))) == 22
    with pytest.raises(OSError, match="Could not find trained model"):
        estimator.get_variable_names()


def test_steps_must_be_above_zero(trained):
    for call in (trained.evaluate, trained.train):
        with pytest.raises(ValueError, match="steps > 0"):
            call(data(4), steps=0)
    with pytest.raises(ValueError, match="both steps and max_steps"):
        trained.train(data(4), steps=1, max_steps=1)
    with pytest.raises(TypeError, match="input_fn"):
        trained.evaluate(data(4)())
