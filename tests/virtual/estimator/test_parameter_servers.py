"""`Estimator.train` on parameter servers and workers, against one device with the same elements."""

import threading

import keras
import numpy as np
import pytest

import unisono
from tests.ps_cluster import local_strategy
from tests.virtual.estimator.test_train import (
    ADAM,
    IMAGES,
    LABELS,
    MSE,
    X,
    Y,
    cnn,
    data,
    dropout,
    mlp,
    model_fn_of,
)
from unisono.data import Dataset
from unisono.estimator import (
    Estimator,
    EstimatorSpec,
    EvalSpec,
    RunConfig,
    SessionRunArgs,
    SessionRunHook,
    TrainSpec,
    train,
    train_and_evaluate,
)
from unisono.estimator._train_op import minimize
from unisono.estimator.session._input import InputFunction
from unisono.estimator.session._model_step import ModelFunction
from unisono.estimator.session._train import Training, TrainTask
from unisono.parameter_server.chief import _remote_variables

SCE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def trained(strategy, model_fn, input_fn, model_dir=None, **options):
    config = RunConfig(tf_random_seed=3, train_distribute=strategy, save_summary_steps=0)
    return Estimator(model_fn, model_dir, config).train(input_fn, **options)


def assert_equal(ours, one, tolerance=1e-5):
    names = one.get_variable_names()
    assert ours.get_variable_names() == names
    for name in names:
        np.testing.assert_allclose(
            ours.get_variable_value(name), one.get_variable_value(name), atol=tolerance, err_msg=name
        )


def decaying(features, labels, mode):
    outputs = keras.layers.Dense(1)(features)
    loss = keras.losses.MeanSquaredError()(labels, outputs)
    step = train.get_global_step()
    rate = train.exponential_decay(0.1, step, 2, 0.5)
    train_op = train.MomentumOptimizer(rate, 0.9).minimize(loss, step)
    metric = keras.metrics.MeanAbsoluteError()
    metric.update_state(labels, outputs)
    return EstimatorSpec(mode, {"y": outputs}, loss, train_op, eval_metric_ops={"mae": metric})


@pytest.mark.parametrize(
    ("model_fn", "x", "y"),
    [
        (model_fn_of(dropout, MSE, ADAM), X, Y),
        (model_fn_of(mlp, MSE, ADAM, clips=True), X, Y),
        (model_fn_of(cnn, lambda: SCE, ADAM), IMAGES[:20], LABELS[:20]),
        # The last element is short.
        (decaying, X[:65], Y[:65]),
    ],
    ids=["dropout", "clipped", "cnn", "decaying rate"],
)
def test_one_worker_is_one_device(model_fn, x, y):
    one = trained(None, model_fn, data(x, y, 10))
    with local_strategy(workers=1, servers=2) as strategy:
        ours = trained(strategy, model_fn, data(x, y, 10))
    assert ours.get_variable_value("global_step") == -(-len(x) // 10)
    assert_equal(ours, one)


def test_two_workers_without_staleness_are_one_device():
    # Whichever worker takes the next step, it has the same element.
    def input_fn():
        return Dataset.from_tensors((X[:20], Y[:20])).repeat()

    one = trained(None, model_fn_of(mlp, MSE, ADAM), input_fn, max_steps=30)
    # Kernels lie in parts on two servers.
    parts = unisono.partitioners.FixedShardsPartitioner(2)
    with local_strategy(2, 2, max_staleness=0, variable_partitioner=parts) as strategy:
        ours = trained(strategy, model_fn_of(mlp, MSE, ADAM), input_fn, max_steps=30)
    assert_equal(ours, one)


def test_all_elements_of_all_workers_are_trained_on_once():
    def model_fn(features, labels, mode):
        weight = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="sum")
        loss = keras.ops.sum(weight(features))
        return EstimatorSpec(mode, loss=loss, train_op=train.GradientDescentOptimizer(1.0).minimize(loss))

    def input_fn(input_context):
        first = 100 * input_context.input_pipeline_id
        count = (5, 40)[input_context.input_pipeline_id]
        return (
            Dataset.from_tensor_slices(np.arange(first, first + count, dtype="float32"))
            .batch(1)
            .map(lambda x: (x[:, None], x))
        )

    with local_strategy(workers=2, servers=1) as strategy:
        ours = trained(strategy, model_fn, input_fn)
    assert ours.get_variable_value("global_step") == 45
    assert ours.get_variable_value("sum/kernel") == -(sum(range(5)) + sum(range(100, 140)))


def test_a_worker_may_have_no_element_at_all():
    def input_fn(input_context):
        count = 50 * input_context.input_pipeline_id
        return data(X[:count], Y[:count], 10)()

    with local_strategy(workers=2, servers=1) as strategy:
        ours = trained(strategy, model_fn_of(dropout, MSE, ADAM), input_fn)
    assert ours.get_variable_value("global_step") == 5


class Watching(SessionRunHook):
    def __init__(self):
        self.steps, self.outputs = [], []

    def before_run(self, run_context):
        return SessionRunArgs({"y": "y", "step": "global_step"})

    def after_run(self, run_context, run_values):
        self.steps.append(int(run_values.results["step"]))
        self.outputs.append(np.asarray(run_values.results["y"]))


def test_hooks_get_arrays_and_a_worker_may_be_lost(tmp_path):
    class Losing(SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.session.global_step == 4:
                cluster, task = strategy.cluster, strategy.cluster.worker_tasks[1]
                cluster.kill_worker(task)
                cluster.start_worker(task)

    watching = Watching()
    with local_strategy(workers=2, servers=2) as strategy:
        trained(
            strategy, decaying, lambda: data(X, Y, 10)().repeat(), max_steps=12, hooks=[watching, Losing()]
        )
    assert watching.steps == list(range(1, 13))
    assert {y.shape for y in watching.outputs} == {(10, 1)}


def test_the_losses_of_all_steps_are_returned_where_asked_for(tmp_path):
    config, losses = RunConfig(save_summary_steps=0), []
    with local_strategy(workers=1, servers=1) as strategy:
        task = TrainTask(
            ModelFunction(decaying, None, config), strategy, None, config=config, model_dir=str(tmp_path)
        )
        runner = Training(task, InputFunction(data(X, Y, 10), {})).runner
        with runner.around_training():
            with strategy.scope():
                assert runner.create_variables()
            done, values = runner.run(3, [], losses)
    assert done == sum(count for count, _ in losses) == 3
    assert float(losses[-1][1][0]) == float(values["loss"]) != float(losses[0][1][0])


def test_checkpoints_go_to_other_strategies_and_back(tmp_path):
    model_fn = model_fn_of(mlp, MSE, ADAM)
    one = trained(None, model_fn, data(X, Y, 10))
    with local_strategy(workers=1, servers=2) as strategy:
        trained(strategy, model_fn, data(X[:20], Y[:20], 10), tmp_path)
        trained(unisono.MirroredStrategy(["cpu:0", "cpu:1"]), model_fn, data(X[20:40], Y[20:40], 5), tmp_path)
        # In one process a second training, as of another model.
        ours = trained(strategy, model_fn, data(X[40:], Y[40:], 10), tmp_path)
        assert ours.get_variable_value("global_step") == 7
        assert_equal(ours, one, 1e-4)
        assert ours.evaluate(data(X, Y, 10))["loss"] == pytest.approx(
            one.evaluate(data(X, Y, 10))["loss"], rel=1e-4
        )


def test_train_and_evaluate_in_turn(tmp_path):
    with local_strategy(workers=2, servers=1) as strategy:
        config = RunConfig(
            tf_random_seed=3, train_distribute=strategy, eval_distribute=strategy, save_checkpoints_steps=10
        )
        estimator = Estimator(decaying, tmp_path, config)
        results, _ = train_and_evaluate(
            estimator,
            TrainSpec(lambda: data(X, Y, 10)().repeat(), max_steps=30),
            EvalSpec(data(X, Y, 10), throttle_secs=0),
        )
        assert results["global_step"] == 30
        assert results["loss"] < 0.5
        # Each training makes its variables anew: those of the last one are nowhere on the cluster.
        for _ in range(4):
            estimator.train(data(X, Y, 10), steps=2)
            assert [len(server.store.variables) for server in strategy.cluster.servers] == [0]
            assert not strategy._job.variables._placed
            assert not strategy._job._names
            assert not strategy.state_layout._notes
        assert estimator.get_variable_value("global_step") == 38
        kept = [len(client._known) for client in strategy.cluster.clients]
        # A worker forgets with its next pull.
        assert max(kept) <= len(estimator.get_variable_names())


def test_an_error_of_the_input_is_raised(tmp_path):
    def input_fn(input_context):
        if input_context.num_input_pipelines == 2:
            yield X[:10], Y[:10]
        raise OSError("the file is gone")

    with local_strategy(workers=2, servers=1) as strategy:
        with pytest.raises(Exception, match="the file is gone"):
            trained(strategy, decaying, input_fn)
        # The cluster goes on.
        ours = trained(strategy, decaying, data(X, Y, 10), max_steps=3)
    assert ours.get_variable_value("global_step") == 3


def test_data_must_hold_an_element_and_be_sent(tmp_path):
    with local_strategy(workers=2, servers=1) as strategy:
        with pytest.raises(unisono.InvalidArgumentError, match="at least one element"):
            trained(strategy, decaying, lambda: Dataset.from_tensor_slices((X[:0], Y[:0])))
        lock = threading.Lock()
        with pytest.raises(unisono.InvalidTypeError, match="inside of the input_fn"):
            trained(strategy, decaying, lambda: (lock, data(X, Y, 10)())[1])


@pytest.mark.parametrize("scales", [False, True])
def test_a_rate_of_the_step_reaches_updates_by_rows(tuned, scales):
    tuned(_remote_variables, SMALL_TABLE_BYTES=0, TABLE_BYTES=0)

    def optimizer():
        plain = keras.optimizers.SGD(lambda: 0.05)
        return keras.optimizers.LossScaleOptimizer(plain) if scales else plain

    def model_fn(features, labels, mode):
        rows = keras.layers.Embedding(50, 4)(features)
        loss = keras.losses.MeanSquaredError()(labels, keras.ops.sum(rows, (1, 2)))
        return EstimatorSpec(mode, loss=loss, train_op=minimize(optimizer(), loss))

    words = np.random.default_rng(1).integers(0, 50, (40, 3))
    one = trained(None, model_fn, data(words, Y[:40, 0], 10))
    with local_strategy(workers=1, servers=2) as strategy:
        ours = trained(strategy, model_fn, data(words, Y[:40, 0], 10))
        assert any(placed.is_table for placed in strategy._job.variables._placed.values())
    assert_equal(ours, one)
