"""What a model_fn asks for around its steps: order, averages, first values, and how checkpoints are kept."""

import numpy as np
import pytest

import unisono
from unisono import ContextError, InvalidArgumentError, tf
from unisono.checkpoint import CheckpointMismatchError

X = np.arange(1.0, 9.0, dtype="f4").reshape(8, 1)


def input_fn():
    iterator = tf.data.Dataset.from_tensor_slices((X, 2 * X)).batch(2).repeat().make_one_shot_iterator()
    features, labels = iterator.get_next()
    return features, labels


def estimator(tmp_path, model_fn, strategy=None, **config):
    options = tf.estimator.RunConfig(train_distribute=strategy, save_checkpoints_steps=1, **config)
    return tf.estimator.Estimator(model_fn, str(tmp_path), options)


def one_weight(features, labels, mode):
    weight = tf.get_variable("w", [1, 1], initializer=tf.zeros_initializer())
    output = tf.matmul(features, weight)
    return weight, output, 0.0 if labels is None else tf.reduce_mean((output - labels) ** 2)


def averaged(features, labels, mode):
    weight, _, loss = one_weight(features, labels, mode)
    average = tf.train.ExponentialMovingAverage(0.5, tf.train.get_global_step())
    if mode != tf.estimator.ModeKeys.TRAIN:
        saver = tf.train.Saver(average.variables_to_restore())
        scaffold = tf.train.Scaffold(saver=saver, local_init_op=tf.tables_initializer())
        return tf.estimator.EstimatorSpec(mode, {"w": weight + 0}, loss, scaffold=scaffold)
    step = tf.train.get_global_step()
    train_op = tf.train.GradientDescentOptimizer(0.001).minimize(loss, step)
    with tf.control_dependencies([train_op]):
        train_op = average.apply(tf.trainable_variables())
    assert average.average(weight).path == "w/ExponentialMovingAverage"
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


@pytest.mark.parametrize("replicas", [1, 2])
def test_averages_are_restored_in_place_of_variables(tmp_path, replicas):
    strategy = unisono.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]) if replicas > 1 else None
    model = estimator(tmp_path, averaged, strategy).train(input_fn, steps=3)
    weight, average, data = 0.0, 0.0, np.tile(X[:, 0], 3)
    for step in range(3):
        rows = data[2 * replicas * step : 2 * replicas * (step + 1)]
        weight -= 0.001 * np.mean(2 * rows * (weight * rows - 2 * rows))
        # The update follows that of the optimizer, which counts the step when all are made.
        decay = min(0.5, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * weight
    np.testing.assert_allclose(model.get_variable_value("w"), [[weight]], rtol=1e-5)
    name = "w/ExponentialMovingAverage"
    np.testing.assert_allclose(model.get_variable_value(name), [[average]], rtol=1e-5)
    rows = (8 * X).astype("f4")
    found = model.evaluate(lambda: tf.data.Dataset.from_tensors((rows, 0 * rows)))
    np.testing.assert_allclose(found["loss"], np.mean((average * rows) ** 2), rtol=1e-5)
    if replicas == 1:
        # A second training goes on with both.
        before = model.get_variable_value(name)
        model.train(input_fn, steps=1)
        assert model.get_variable_value(name) > before


def ordered(features, labels, mode):
    loss = one_weight(features, labels, mode)[2]
    seen = tf.get_variable("seen", [], trainable=False, initializer=tf.zeros_initializer())
    update = tf.train.GradientDescentOptimizer(0.001).minimize(loss)
    with tf.control_dependencies([update]):
        count = tf.assign_add(seen, 1.0)
        unreached = tf.assign_add(seen, 100.0)
    with tf.control_dependencies([count]):
        train_op = tf.identity(loss)
    with tf.control_dependencies([unreached]), tf.control_dependencies(None):
        train_op = tf.group(train_op, tf.no_op())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def test_updates_are_reached_through_those_that_follow_them(tmp_path):
    model = estimator(tmp_path, ordered).train(input_fn, steps=2)
    assert model.get_variable_value("seen") == 2
    assert model.get_variable_value("w") > 0
    assert model.get_variable_value("global_step") == 2


def with_first_values(source, calls, saves=None):
    def model_fn(features, labels, mode):
        weight, _, loss = one_weight(features, labels, mode)
        other = tf.get_variable("other", [1, 1], trainable=False, initializer=tf.zeros_initializer())
        if source is not None:
            tf.train.init_from_checkpoint(source, {"w": [other]})

        def init_fn(scaffold, session):
            calls.append(float(session.run(other)[0, 0]))
            weight.assign([[3.0]])

        saver = None if saves is None else tf.train.Saver(max_to_keep=saves)
        scaffold = tf.train.Scaffold(init_fn=init_fn, saver=saver)
        train_op = tf.train.GradientDescentOptimizer(0.0).minimize(loss)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, scaffold=scaffold)

    return model_fn


def test_first_values(tmp_path):
    first, calls = estimator(tmp_path / "a", with_first_values(None, []), keep_checkpoint_max=1), []
    first.train(input_fn, steps=1)
    second = estimator(tmp_path / "b", with_first_values(tmp_path / "a", calls, saves=2))
    second.train(input_fn, steps=3)
    assert calls == [3.0]
    assert (second.get_variable_value("w"), second.get_variable_value("other")) == (3.0, 3.0)
    # The saver's number of checkpoints, and not that of the configuration.
    assert sorted(p.name for p in (tmp_path / "b").glob("model.ckpt-*")) == ["model.ckpt-2", "model.ckpt-3"]
    # Not by Orbax: `TrainingSaver`.
    assert (tmp_path / "b" / "model.ckpt-3" / "arrays.safetensors").is_file()
    second.train(input_fn, steps=1)
    assert calls == [3.0]


def test_wrong_first_values(tmp_path):
    first = estimator(tmp_path / "a", with_first_values(None, [])).train(input_fn, steps=1)

    def model_fn(features, labels, mode, params):
        _, _, loss = one_weight(features, labels, mode)
        tf.train.init_from_checkpoint(first.model_dir, params)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.no_op())

    for names, error in [({"absent": "w"}, CheckpointMismatchError), ({"w": "absent"}, InvalidArgumentError)]:
        with pytest.raises(error, match="absent"):
            tf.estimator.Estimator(model_fn, params=names).train(input_fn, steps=1)
    whole = tf.estimator.Estimator(model_fn, params={"/": "/"}).train(input_fn, steps=1)
    assert whole.get_variable_value("w") == 3.0


def test_some_checkpoints_are_kept_for_good(tmp_path, monkeypatch):
    from unisono.checkpoint import _manager

    monkeypatch.setattr(_manager.time, "time", lambda: 0.0)
    model = estimator(
        tmp_path, with_first_values(None, []), keep_checkpoint_max=1, keep_checkpoint_every_n_hours=1
    )
    model.train(input_fn, steps=2)
    model.train(input_fn, steps=2)
    # The first one is hours after 1970; no other is an hour after it.
    names = ["model.ckpt-0", "model.ckpt-4"]
    assert sorted(p.name for p in tmp_path.glob("model.ckpt-*")) == names


def test_sums_over_replicas_are_an_error(tmp_path):
    def model_fn(features, labels, mode):
        tf.get_variable("seen", [], aggregation=tf.VariableAggregation.SUM)
        return tf.estimator.EstimatorSpec(mode, loss=tf.reduce_mean(features), train_op=tf.no_op())

    assert estimator(tmp_path / "one", model_fn).train(input_fn, steps=1).get_variable_names()
    with pytest.raises(InvalidArgumentError, match="aggregation=SUM for 'seen' on 2 replicas"):
        estimator(tmp_path / "two", model_fn, unisono.MirroredStrategy(["cpu:0", "cpu:1"])).train(input_fn)


def test_outside_of_a_model_fn():
    for call in (tf.train.Saver, tf.tables_initializer, tf.train.ExponentialMovingAverage(0.9).apply):
        with pytest.raises(ContextError, match="model_fn"):
            call()
    with pytest.raises(unisono.UnsupportedError, match="feed_dict"):
        tf.train.Scaffold(init_feed_dict={"x": 1})
