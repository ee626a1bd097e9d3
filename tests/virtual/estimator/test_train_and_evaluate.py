"""`train_and_evaluate` in one process: when it evaluates, and what it returns."""

import threading

import keras
import numpy as np
import pytest

import unisono
from unisono.checkpoint import mark_finished
from unisono.data import Dataset
from unisono.estimator import Estimator, EstimatorSpec, EvalSpec, RunConfig, TrainSpec, train_and_evaluate
from unisono.estimator._train_op import minimize

X, Y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")


def model_fn(features, labels, mode):
    loss = keras.ops.mean((keras.layers.Dense(1)(features) - labels) ** 2)
    return EstimatorSpec(mode, loss=loss, train_op=minimize(keras.optimizers.SGD(0.01), loss))


def data():
    return Dataset.from_tensor_slices((X, Y)).batch(4).repeat()


class Exporter:
    name = "best"

    def __init__(self):
        self.calls = []

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        self.calls.append((int(eval_result["global_step"]), is_the_final_export))
        return export_path


def estimator_in(directory, **arguments):
    config = RunConfig(tf_random_seed=1, save_checkpoints_steps=3, save_summary_steps=0, **arguments)
    return Estimator(model_fn, directory, config)


def test_each_checkpoint_is_evaluated(tmp_path):
    exporter, strategy = Exporter(), unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    estimator = estimator_in(tmp_path, train_distribute=strategy)
    spec = EvalSpec(data, steps=2, exporters=exporter, throttle_secs=0)
    metrics, exports = train_and_evaluate(estimator, TrainSpec(data, max_steps=8), spec)
    assert exporter.calls == [(3, False), (6, False), (8, True)]
    assert metrics["global_step"] == 8
    assert exports == [f"{tmp_path}/export/best"]
    assert metrics["loss"] == estimator.evaluate(data, steps=2)["loss"]
    # There is nothing left to do.
    assert train_and_evaluate(estimator, TrainSpec(data, max_steps=8), spec) == (None, [])


def test_evaluations_are_throttled(tmp_path):
    exporter = Exporter()
    spec = EvalSpec(data, steps=1, exporters=[exporter], throttle_secs=600)
    train_and_evaluate(estimator_in(tmp_path), TrainSpec(data, max_steps=9), spec)
    assert exporter.calls == [(3, False), (9, True)]


def test_an_evaluator_ends_with_the_training(tmp_path, monkeypatch):
    task = '{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "evaluator", "index": 0}}'
    trainer = estimator_in(tmp_path)
    monkeypatch.setenv("TF_CONFIG", task)
    exporter, found = Exporter(), []
    spec = EvalSpec(data, steps=1, exporters=exporter, start_delay_secs=0, throttle_secs=0)
    evaluator = estimator_in(tmp_path)
    thread = threading.Thread(
        target=lambda: found.append(train_and_evaluate(evaluator, TrainSpec(data), spec)), daemon=True
    )
    thread.start()
    trainer.train(data, steps=5)
    mark_finished(tmp_path)
    thread.join(60)
    assert found[0][0]["global_step"] == 5
    assert exporter.calls[-1] == (5, False)


def test_a_cluster_needs_a_strategy(tmp_path, monkeypatch):
    task = '{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "chief", "index": 0}}'
    monkeypatch.setenv("TF_CONFIG", task)
    with pytest.raises(ValueError, match="without `train_distribute`"):
        train_and_evaluate(estimator_in(tmp_path), TrainSpec(data), EvalSpec(data))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: TrainSpec(3), TypeError, "input_fn"),
        (lambda: TrainSpec(data, max_steps=0), ValueError, "max_steps > 0"),
        (lambda: TrainSpec(data, hooks=[3]), TypeError, "SessionRunHook"),
        (lambda: EvalSpec(3), TypeError, "input_fn"),
        (lambda: EvalSpec(data, steps=0), ValueError, "steps > 0"),
        (lambda: EvalSpec(data, name=3), TypeError, "name must be a string"),
        (lambda: EvalSpec(data, start_delay_secs=-1), ValueError, "start_delay_secs >= 0"),
        (lambda: EvalSpec(data, throttle_secs=-1), ValueError, "throttle_secs >= 0"),
        (lambda: EvalSpec(data, exporters=[Exporter(), Exporter()]), ValueError, "unique names"),
        (lambda: EvalSpec(data, exporters=3), TypeError, "Exporter"),
        (lambda: train_and_evaluate(None, TrainSpec(data), EvalSpec(data)), TypeError, "Estimator"),
    ],
)
def test_errors(make, error, text):
    with pytest.raises(error, match=text):
        make()
