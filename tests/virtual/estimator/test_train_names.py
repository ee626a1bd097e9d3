"""A model_fn in the words of TensorFlow 1: layers, losses, metrics, optimizers, hooks, summaries."""

import logging

import numpy as np
import pytest

import unisono
from tests.event_files import scalars
from unisono import tf

RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 6, 6, 1)).astype("f4")
Y = RNG.integers(0, 3, 96).astype("i4")


def model_fn(features, labels, mode, params):
    is_training = mode == tf.estimator.ModeKeys.TRAIN
    with tf.variable_scope("net"):
        net = tf.layers.conv2d(features, 4, 3, activation=tf.nn.relu, name="conv")
        net = tf.layers.max_pooling2d(net, 2, 2)
        net = tf.layers.flatten(net)
        net = tf.layers.batch_normalization(net, training=is_training and params["normalized"])
        net = tf.layers.dropout(net, 0.0, training=is_training)
        logits = tf.layers.dense(net, 3, kernel_regularizer=tf.keras.regularizers.L2(0.01), name="logits")
    classes = tf.argmax(logits, 1)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={"classes": classes})
    tf.losses.sparse_softmax_cross_entropy(labels=labels, logits=logits)
    loss = tf.losses.get_total_loss()
    accuracy = tf.metrics.accuracy(labels=labels, predictions=classes)
    tf.summary.scalar("accuracy", accuracy[1])
    if not is_training:
        top = tf.metrics.recall_at_k(labels, logits, 2)
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, eval_metric_ops={"accuracy": accuracy, "top_2": top}
        )
    step = tf.train.get_or_create_global_step()
    rate = tf.train.exponential_decay(0.1, step, 5, 0.5, staircase=True)
    tf.identity(rate, name="rate")
    optimizer = tf.train.MomentumOptimizer(rate, 0.9)
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        grads, variables = zip(*optimizer.compute_gradients(loss), strict=True)
        grads, _ = tf.clip_by_global_norm(grads, 1.0)
        train_op = optimizer.apply_gradients(zip(grads, variables, strict=True), global_step=step)
    hook = tf.train.LoggingTensorHook({"rate": "rate", "doubled": 2 * loss}, every_n_iter=6)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=[hook])


def trained(directory, strategy, batch, hooks=(), normalized=True):
    config = tf.estimator.RunConfig(
        tf_random_seed=3, train_distribute=strategy, save_summary_steps=5, log_step_count_steps=5
    )
    params = {"normalized": normalized}
    estimator = tf.estimator.Estimator(model_fn, str(directory), config, params)

    def input_fn():
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch).repeat()

    return estimator.train(input_fn, hooks=list(hooks), steps=12)


def values(estimator):
    names = [n for n in estimator.get_variable_names() if "net/" in n]
    return {name: estimator.get_variable_value(name) for name in names}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Trained on one device, with the log lines and what a hook has seen."""

    class Seen(tf.train.SessionRunHook):
        def __init__(self):
            self.rates, self.steps = [], []

        def begin(self):
            self.step = tf.train.get_global_step()

        def before_run(self, run_context):
            return tf.train.SessionRunArgs(["rate", self.step])

        def after_run(self, run_context, run_values):
            rate, step = run_values.results
            self.rates.append(float(rate))
            self.steps.append(int(step))

    lines, handler, seen = [], logging.Handler(), Seen()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("unisono")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        estimator = trained(tmp_path_factory.mktemp("one"), None, 16, [seen], normalized=False)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return estimator, lines, seen


def test_hooks_see_the_values_of_each_step(one):
    _, lines, seen = one
    assert seen.steps == list(range(1, 13))
    np.testing.assert_allclose(seen.rates, [0.1] * 5 + [0.05] * 5 + [0.025] * 2, rtol=1e-6)
    logged = [line for line in lines if line.startswith("doubled = ")]
    assert len(logged) == 2
    assert logged[1].split("rate = ")[1].startswith("0.05")


def test_summaries_are_written_every_so_many_steps(one):
    estimator, _, _ = one
    found = scalars(estimator.model_dir, "accuracy")
    assert [step for step, _ in found] == [1, 6, 11]
    assert all(0 <= value <= 1 for _, value in found)
    assert [step for step, _ in scalars(estimator.model_dir, "global_step/sec")] == [6, 11]


def test_two_replicas_learn_what_one_device_learns(one, tmp_path):
    estimator, _, _ = one
    strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    other = trained(tmp_path, strategy, 8, normalized=False)
    mine, theirs = values(estimator), values(other)
    assert sorted(mine) == sorted(theirs)
    assert any("conv/kernel" in name for name in mine)
    for name, value in mine.items():
        np.testing.assert_allclose(theirs[name], value, rtol=2e-4, atol=2e-5, err_msg=name)


def test_evaluation_counts_all_rows(one):
    estimator, _, _ = one

    def input_fn():
        return tf.data.Dataset.from_tensor_slices((X[:50], Y[:50])).batch(16)

    found = estimator.evaluate(input_fn)
    classes = [
        p["classes"] for p in estimator.predict(lambda: tf.data.Dataset.from_tensor_slices(X[:50]).batch(16))
    ]
    assert found["accuracy"] == pytest.approx(np.mean(np.array(classes) == Y[:50]), abs=1e-6)
    assert found["accuracy"] <= found["top_2"] <= 1
    assert found["global_step"] == 12


def test_statistics_of_batches_are_updated(tmp_path):
    moving = values(trained(tmp_path, None, 16))
    (mean,) = [v for n, v in moving.items() if n.endswith("moving_mean")]
    assert np.abs(mean).max() > 0


def test_training_stops_when_evaluations_are_good_enough(tmp_path):
    config = tf.estimator.RunConfig(tf_random_seed=3, save_checkpoints_steps=2)
    estimator = tf.estimator.Estimator(model_fn, str(tmp_path), config, {"normalized": False})

    def input_fn():
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).repeat()

    estimator.train(input_fn, steps=2)
    estimator.evaluate(input_fn, steps=1)
    stop = tf.estimator.experimental.stop_if_lower_hook(
        estimator, "loss", 1e9, run_every_secs=None, run_every_steps=1
    )
    estimator.train(input_fn, hooks=[stop], max_steps=100)
    assert estimator.get_variable_value("global_step") == 3


def test_an_evaluator_in_memory(tmp_path):
    config = tf.estimator.RunConfig(tf_random_seed=3)
    estimator = tf.estimator.Estimator(model_fn, str(tmp_path), config, {"normalized": False})

    def input_fn():
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(32)

    hook = tf.estimator.experimental.InMemoryEvaluatorHook(estimator, input_fn, steps=1, every_n_iter=2)
    estimator.train(input_fn, hooks=[hook])
    assert [step for step, _ in scalars(estimator.eval_dir(), "loss")] == [0, 2, 3]
