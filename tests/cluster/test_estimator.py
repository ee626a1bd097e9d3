"""An Estimator in a launch of two workers and an evaluator: exact, with unequal data, and after a kill."""

import ast
import re

import numpy as np
import pytest

from tests.cluster.launch_support import launched
from unisono.checkpoint import load_checkpoint
from unisono.data import Dataset
from unisono.estimator import Estimator, RunConfig

#: Also run by this file: the same model and data on one device.
COMMON = """
import numpy as np, keras
from unisono.estimator import Estimator, EstimatorSpec, RunConfig
from unisono.estimator._train_op import minimize
from unisono.data import Dataset

def model_fn(features, labels, mode):
    model = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    outputs = model(features)
    loss = keras.losses.MeanSquaredError()(labels, outputs)
    metric = keras.metrics.MeanAbsoluteError(name="mae")
    metric.update_state(labels, outputs)
    train_op = minimize(keras.optimizers.Adam(0.01), loss)
    return EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops={"mae": metric})

def batches(worker):
    # The second worker has fewer elements, and a short one.
    sizes = [4] * 9 if worker == 0 else [4] * 6 + [2]
    rng = np.random.default_rng(worker)
    return [(x := rng.normal(size=(n, 3)).astype("float32"), x.sum(1, keepdims=True)) for n in sizes]
"""

SCRIPT = (
    COMMON
    + """
import unisono
from unisono.estimator import EvalSpec, TrainSpec, SessionRunHook, train_and_evaluate
from unisono.estimator.hooks import NanLossDuringTrainingError

class Kill(SessionRunHook):
    def before_run(self, run_context):
        if generation == 0 and me == "worker:1" and run_context.session.global_step >= 20:
            os.kill(os.getpid(), signal.SIGKILL)

class Diverge(SessionRunHook):
    def after_run(self, run_context, run_values):
        if me == "worker:1" and run_context.session.global_step == 2:
            raise NanLossDuringTrainingError("diverged")

def exact(input_context):
    own = batches(input_context.input_pipeline_id)
    return Dataset.from_generator(lambda: iter(own))

def endless(input_context):
    own = batches(input_context.input_pipeline_id)[:4]
    return Dataset.from_generator(lambda: iter(own)).repeat()

os.chdir(os.path.dirname(os.path.abspath(__file__)))
strategy = unisono.CollectiveAllReduceStrategy()
both = {"train_distribute": strategy, "eval_distribute": strategy}
config = RunConfig(tf_random_seed=1, save_summary_steps=0, **both)
if config.task_type == "worker":
    first = Estimator(model_fn, "exact", config).train(exact, max_steps=9)
    # The first worker writes its checkpoint while the others are ready to go on.
    alone = Estimator(model_fn, "exact", config.replace(eval_distribute=None))
    print("seen", alone.evaluate(exact, steps=1)["global_step"])
    first.train(exact, max_steps=9)
    print("evaluated", first.evaluate(exact)["mae"])
    try:
        Estimator(model_fn, "diverged", config).train(endless, max_steps=9, hooks=[Diverge()])
    except NanLossDuringTrainingError as error:
        print("stopped", error)
config = config.replace(save_checkpoints_steps=5, eval_distribute=None)
evaluated = EvalSpec(endless, steps=4, start_delay_secs=0, throttle_secs=0)
train_and_evaluate(
    Estimator(model_fn, "resumed", config), TrainSpec(endless, max_steps=40, hooks=[Kill()]), evaluated
)
print("ended")
"""
)

names: dict = {}
exec(COMMON, names)


def unions():
    first, second = names["batches"](0), names["batches"](1)
    for i, (x, y) in enumerate(first):
        others = second[i : i + 1]
        yield np.concatenate([x, *(o[0] for o in others)]), np.concatenate([y, *(o[1] for o in others)])


@pytest.mark.timeout(600)
def test_workers_train_alike_and_go_on_after_a_kill(tmp_path):
    flags = ("-n", "2", "--evaluator", "--max-restarts", "1", "--spares", "0")
    with launched(tmp_path, SCRIPT, *flags, forks=True) as run:
        assert run.end() == 0
        assert [e["detail"] for e in run.history("ending")] == ["failed"]
        logs = {task: run.log(task) for task in ("worker:0", "worker:1", "evaluator:0")}
    one = Estimator(names["model_fn"], config=RunConfig(tf_random_seed=1, save_summary_steps=0))
    one.train(lambda: Dataset.from_generator(unions))
    values = load_checkpoint(f"{tmp_path}/exact")
    assert values.get_tensor("global_step") == 9
    for name in one.get_variable_names():
        np.testing.assert_allclose(
            values.get_tensor(name), one.get_variable_value(name), atol=1e-5, err_msg=name
        )
    mae = one.evaluate(lambda: Dataset.from_generator(unions))["mae"]
    for worker in ("worker:0", "worker:1"):
        found = [float(line.split()[-1]) for line in logs[worker].splitlines() if "evaluated " in line]
        np.testing.assert_allclose(found[0], mae, rtol=1e-4)
        assert "ended" in logs[worker]
        assert "seen 9" in logs[worker]
        assert "stopped diverged" in logs[worker]
    assert load_checkpoint(f"{tmp_path}/resumed").get_tensor("global_step") == 40
    assert "global_step=40" in logs["evaluator:0"] or "ended" in logs["evaluator:0"]


SPANNING = (
    COMMON
    + """
import unisono
from unisono.checkpoint import load_checkpoint
from unisono.estimator import EvalSpec, TrainSpec, train_and_evaluate

def wide(features, labels, mode):
    up, down = keras.layers.Dense(512, "tanh", name="up"), keras.layers.Dense(1, name="down")
    outputs = keras.Sequential([up, down])(features)
    loss = keras.losses.MeanSquaredError()(labels, outputs)
    train_op = minimize(keras.optimizers.Adam(0.01), loss)
    return EstimatorSpec(mode, loss=loss, train_op=train_op)

def rows():
    return Dataset.from_generator(lambda: iter(batches(0))).repeat()

os.chdir(os.path.dirname(os.path.abspath(__file__)))
rules = {".*up/kernel": (None, "model"), ".*up/bias": ("model",), ".*down/kernel": ("model", None)}
strategy = unisono.MultiWorkerMirroredStrategy(
    devices_per_replica=2, layout_map=rules, state_layout="fully_sharded"
)
print("replicas", strategy.num_replicas_in_sync, "of", strategy.mesh.devices_per_replica)
for name, given in (("alone", {}), ("same", {"eval_distribute": strategy})):
    config = RunConfig(
        tf_random_seed=1, save_summary_steps=0, save_checkpoints_steps=5, train_distribute=strategy, **given
    )
    once = EvalSpec(rows, steps=9, start_delay_secs=0, throttle_secs=0)
    found, _ = train_and_evaluate(Estimator(wide, name, config), TrainSpec(rows, max_steps=15), once)
    print("found", name, found and (int(found["global_step"]), float(found["loss"])))
"""
)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_an_evaluator_beside_a_replica_of_two_workers(tmp_path):
    """It has one device, and evaluates the checkpoints of a model that each worker has half of."""
    with launched(tmp_path, SPANNING, "-n", "2", "--evaluator", "--max-restarts", "0", forks=True) as run:
        assert run.end() == 0, run.err
        logs = {task: run.log(task) for task in ("worker:0", "worker:1", "evaluator:0")}
    for worker in ("worker:0", "worker:1"):
        assert "replicas 1 of 2" in logs[worker]
        assert "found same None" in logs[worker]
    assert "replicas 1 of 1" in logs["evaluator:0"]
    found = dict(re.findall(r"^found (\w+) (.*)$", logs["evaluator:0"], re.MULTILINE))
    one_names: dict = {}
    exec(SPANNING.partition("os.chdir")[0], one_names)
    one = Estimator(one_names["wide"], config=RunConfig(tf_random_seed=1, save_summary_steps=0))
    one.train(one_names["rows"], max_steps=15)
    loss = one.evaluate(one_names["rows"], steps=9)["loss"]
    for name in ("alone", "same"):
        step, seen = ast.literal_eval(found[name])
        assert step == 15
        np.testing.assert_allclose(seen, loss, rtol=1e-4)
