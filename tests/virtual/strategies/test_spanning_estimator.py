"""An Estimator on replicas whose devices belong to several processes; runs in each process of a cluster.

`tests/cluster/test_contract.py` starts the processes.
"""

import os

import keras
import numpy as np
import pytest

import unisono
from tests.virtual.strategies.test_replica_grid_workers import shared
from tests.virtual.strategies.test_spanning_shards import strategy
from unisono.checkpoint import load_checkpoint
from unisono.data import Dataset
from unisono.estimator import (
    Estimator,
    EstimatorSpec,
    EvalSpec,
    RunConfig,
    SessionRunHook,
    TrainSpec,
    train_and_evaluate,
)
from unisono.estimator._train_op import minimize
from unisono.model_parallel._spanning_layout import SpannedParts
from unisono.sharding._shards import Shards
from unisono.step._keras_internals import stored_value

pytestmark = pytest.mark.skipif("TF_CONFIG" not in os.environ, reason="needs a cluster")

RULES = {".*up/kernel": (None, "model"), ".*up/bias": ("model",), ".*down/kernel": ("model", None)}
#: Rows of each element. The second replica has fewer of them, and a short one.
SIZES = [[4] * 9, [4] * 6 + [2]]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Join the cluster before the first test: it sets XLA_FLAGS, for which no test must be blamed."""
    return strategy("mirrored", RULES)


def model_fn(features, labels, mode):
    up, down = keras.layers.Dense(512, "tanh", name="up"), keras.layers.Dense(1, name="down")
    outputs = keras.Sequential([up, down])(features)
    loss = keras.losses.MeanSquaredError()(labels, outputs)
    metric = keras.metrics.MeanAbsoluteError(name="mae")
    metric.update_state(labels, outputs)
    train_op = minimize(keras.optimizers.Adam(0.01, global_clipnorm=1.0), loss)
    return EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops={"mae": metric})


def elements(number):
    generator = np.random.default_rng(number)
    drawn = (generator.normal(size=(n, 3)).astype("float32") for n in SIZES[number])
    return [(x, x.sum(1, keepdims=True)) for x in drawn]


def of_replica(input_context):
    own = elements(input_context.input_pipeline_id)
    return Dataset.from_generator(lambda: iter(own))


def of_all(replicas):
    """What one device takes in place of all replicas."""
    every = [elements(i) for i in range(replicas)]
    for i, (x, y) in enumerate(every[0]):
        others = [one[i] for one in every[1:] if i < len(one)]
        yield np.concatenate([x, *(o[0] for o in others)]), np.concatenate([y, *(o[1] for o in others)])


class Held(SessionRunHook):
    """Notes what the kernel that is cut holds, and lets one worker alone ask for a checkpoint."""

    def __init__(self, asks):
        self._asks = asks
        self.kernel = None

    def after_run(self, run_context, run_values):
        session = run_context.session
        if session.global_step == 2 and self._asks:
            session.save()
        by_path = session._variable.__self__
        self.kernel = stored_value(next(v for path, v in by_path.items() if path.endswith("up/kernel")))


@pytest.mark.parametrize("layout", ["mirrored", "sharded", "fully_sharded"])
def test_spanning_estimator(tmp_path, layout, monkeypatch):
    """Training, checkpoints that one worker asks for, going on, and evaluation, with unequal data."""
    own = strategy(layout, RULES)
    replicas = own.num_replicas_in_sync
    options = {"tf_random_seed": 1, "save_summary_steps": 0, "save_checkpoints_steps": 4}
    config = RunConfig(train_distribute=own, eval_distribute=own, **options)
    folder = shared(tmp_path, f"estimator-{layout}")
    hook = Held(asks=own.worker_index == own.num_workers - 1)
    first = Estimator(model_fn, folder, config).train(of_replica, max_steps=7, hooks=[hook])
    kind = Shards if layout == "fully_sharded" and replicas > 1 else SpannedParts
    assert isinstance(hook.kernel, kind)
    steps = [0, 2, 4, 7]
    assert [int(path.rpartition("-")[2]) for path in _checkpoints(folder)] == steps
    spec = TrainSpec(of_replica, max_steps=12)
    train_and_evaluate(Estimator(model_fn, folder, config), spec, EvalSpec(of_replica))
    found = first.evaluate(of_replica)
    # By itself, and not a task of the cluster.
    monkeypatch.delenv("TF_CONFIG")
    one = Estimator(model_fn, config=RunConfig(**options))
    for most in (7, 12):
        one.train(lambda: Dataset.from_generator(lambda: of_all(replicas)), max_steps=most)
    values = load_checkpoint(folder)
    assert values.get_tensor("global_step") == 12
    for name in one.get_variable_names():
        wanted = one.get_variable_value(name)
        np.testing.assert_allclose(values.get_tensor(name), wanted, rtol=2e-5, atol=2e-5, err_msg=name)
    wanted = one.evaluate(lambda: Dataset.from_generator(lambda: of_all(replicas)))
    assert set(found) == set(wanted)
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=2e-5, err_msg=name)


def _checkpoints(folder):
    names = [name for name in os.listdir(folder) if name.startswith("model.ckpt-") and "." not in name[11:]]
    return sorted(names, key=lambda name: int(name.rpartition("-")[2]))


def test_spanning_estimator_of_other_rows(tmp_path):
    """Each process of a replica draws rows of its own."""
    own = strategy("mirrored", RULES)

    def apart(input_context):
        (x, y), *_ = elements(0)
        return Dataset.from_tensor_slices((x, y)).shuffle(4, seed=own.worker_index).batch(2)

    config = RunConfig(train_distribute=own, tf_random_seed=1, save_summary_steps=0)
    with pytest.raises(unisono.InvalidArgumentError, match="All processes of a replica must make the same"):
        Estimator(model_fn, shared(tmp_path, "apart"), config).train(apart, max_steps=9)
