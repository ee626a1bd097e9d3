"""An Estimator in a launch of chief, workers, parameter server and evaluator; a worker is killed."""

import numpy as np
import pytest

from tests.cluster.launch_support import launched
from unisono.checkpoint import load_checkpoint

SCRIPT = """
import keras
import numpy as np
import unisono
from unisono.data import Dataset
from unisono.estimator import (
    Estimator, EstimatorSpec, EvalSpec, ModeKeys, RunConfig, TrainSpec, train, train_and_evaluate
)

def model_fn(features, labels, mode):
    outputs = keras.layers.Dense(1, name="line")(features)
    predictions = {"y": outputs}
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions)
    loss = keras.losses.MeanSquaredError()(labels, outputs)
    train_op = train.GradientDescentOptimizer(0.05).minimize(loss, train.get_global_step())
    return EstimatorSpec(mode, predictions, loss, train_op)

def batches(worker, killing):
    rng = np.random.default_rng(worker)
    count = 0
    while True:
        if killing and worker == 1 and count == 20 and not os.path.exists(killing):
            open(killing, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        # Else the other worker, which may start earlier, could take all steps.
        while killing and worker == 0 and count == 20 and not os.path.exists(killing):
            time.sleep(0.01)
        count += 1
        x = rng.normal(size=(16, 3)).astype("float32")
        yield x, x.sum(1, keepdims=True) + 1

directory = os.path.dirname(os.path.abspath(__file__))

def endless(input_context):
    assert input_context.num_input_pipelines == 2
    killed = directory + "/killed"
    return Dataset.from_generator(lambda: batches(input_context.input_pipeline_id, killed))

def test_input():
    return Dataset.from_generator(lambda: batches(7, None)).take(4)

strategy = unisono.ParameterServerStrategy()
config = RunConfig(tf_random_seed=1, train_distribute=strategy, save_checkpoints_steps=100)
estimator = Estimator(model_fn, directory + "/model", config)
results, _ = train_and_evaluate(
    estimator, TrainSpec(endless, max_steps=300),
    EvalSpec(test_input, steps=4, start_delay_secs=0, throttle_secs=0),
)
if config.is_chief:
    print("evaluated", estimator.evaluate(test_input)["loss"])
    rows = list(estimator.predict(lambda: Dataset.from_tensor_slices(np.eye(3, dtype="float32")).batch(3)))
    print("predicted", len(rows))
print("ended", config.task_type, results and results["global_step"])
"""


@pytest.mark.timeout(600)
def test_all_tasks_run_one_file(tmp_path):
    options = ("-n", "2", "--ps", "1", "--chief", "--evaluator", "--max-restarts", "1", "--spares", "0")
    with launched(tmp_path, SCRIPT, *options, forks=True) as run:
        assert run.end() == 0
        logs = {task: run.log(task) for task in ("chief:0", "worker:0", "worker:1", "ps:0", "evaluator:0")}
    assert (tmp_path / "killed").exists()
    values = load_checkpoint(f"{tmp_path}/model")
    assert values.get_tensor("global_step") == 300
    np.testing.assert_allclose(values.get_tensor("line/kernel"), 1, atol=0.05)
    np.testing.assert_allclose(values.get_tensor("line/bias"), 1, atol=0.05)
    assert "predicted 3" in logs["chief:0"]
    assert "ended chief None" in logs["chief:0"]
    assert "ended evaluator 300" in logs["evaluator:0"]
    assert "ended" not in logs["worker:0"] + logs["worker:1"] + logs["ps:0"]
