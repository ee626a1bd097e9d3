"""Names with two meanings, and names of the Estimator."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unisono
import unisono.estimator
from unisono import tf
from unisono.estimator import layers, losses, metrics, train
from unisono.estimator._train_op import ModelCall, TrainOpGroup, entered_call
from unisono.tf._table import TABLE


@pytest.fixture
def call():
    with entered_call(ModelCall("train", None, None)) as call:
        yield call


def names_below(module):
    return {name.removeprefix(f"{module}.") for name in TABLE.entries if name.startswith(f"{module}.")}


def test_all_names_of_the_estimator_are_in_the_table():
    modules = {"exporters", "experimental", "hooks", "inputs", "layers", "losses", "metrics", "summary"}
    known = names_below("estimator") | names_below("estimator.export")
    assert (
        set(unisono.estimator.__all__) - modules - {"train", "DistributeConfig", "HParams", "TaskType"}
        <= known
    )
    assert set(layers.__all__) - names_below("layers") <= set(TABLE.entries)
    assert set(losses.__all__) <= names_below("losses")
    assert set(metrics.__all__) - {"MetricPair"} <= names_below("metrics")
    assert set(train.__all__) <= names_below("train")


def test_a_loss_of_both():
    y, p = np.array([[1.0, 2.0]], "f4"), np.array([[2.0, 4.0]], "f4")
    assert tf.losses.mean_squared_error(y, p).shape == (1,)
    assert tf.losses.mean_squared_error(labels=y, predictions=p).shape == ()
    assert tf.compat.v1.losses.mean_squared_error(y, p).shape == ()
    assert tf.metrics.mean_absolute_error(y_true=y, y_pred=p).shape == (1,)
    assert float(tf.metrics.mean_absolute_error(y, predictions=p)[1]) == 1.5
    assert float(tf.compat.v1.metrics.mean_squared_error(y, p)[1]) == 2.5
    with entered_call(ModelCall("train", None, None)):
        assert tf.losses.mean_squared_error(y, p).shape == ()
        assert tf.losses.mean_squared_error(y_true=y, y_pred=p).shape == (1,)
    assert tf.losses.MeanSquaredError is keras.losses.MeanSquaredError
    assert tf.metrics.Mean is keras.metrics.Mean
    assert tf.losses.Reduction.SUM == "weighted_sum"
    assert tf.losses.softmax_cross_entropy is losses.softmax_cross_entropy


def test_summaries_of_both(call, tmp_path):
    recorded = [
        tf.summary.scalar("a", 1.0),
        tf.summary.histogram("b", values=np.ones(3)),
        tf.summary.image("c", np.ones((1, 2, 2, 1)), max_outputs=1),
        tf.summary.text("d", tensor="x"),
    ]
    assert tf.summary.merge_all() == recorded == tf.summary.merge(recorded)
    writer = tf.summary.create_file_writer(str(tmp_path))
    with writer.as_default():
        assert tf.summary.scalar("a", 1.0, step=3) is True
        assert tf.summary.histogram("b", np.ones(3), 3, buckets=4) is True
        assert tf.summary.image("c", np.ones((1, 2, 2, 1)), step=3) is True
        assert tf.summary.text("d", "x", step=3) is True
    assert tf.summary.merge_all() == recorded


def test_collections(call):
    call.store = type("Store", (), {})()
    variable, frozen = keras.Variable(1.0, name="a"), keras.Variable(1.0, trainable=False, name="b")
    call.store.used, call.store.trainable_variables = [variable, frozen], [variable]
    call.store.global_step = frozen
    keys = tf.GraphKeys
    assert tf.get_collection(keys.UPDATE_OPS) == []
    assert tf.get_collection(keys.TRAINABLE_VARIABLES) == [variable] == tf.trainable_variables()
    assert tf.get_collection(keys.GLOBAL_VARIABLES) == [variable, frozen] == tf.global_variables()
    assert tf.global_variables("b") == [frozen]
    assert tf.get_collection(keys.GLOBAL_STEP) == [frozen]
    loss = tf.losses.mean_squared_error([1.0], [2.0])
    assert tf.get_collection(keys.LOSSES) == [loss]
    assert tf.get_collection(keys.REGULARIZATION_LOSSES) == []
    tf.add_to_collection("mine", 3)
    assert tf.get_collection("mine") == [3]


def test_updates_and_names(call):
    assert isinstance(tf.group(tf.no_op(), []), TrainOpGroup)
    named = tf.identity(jnp.ones(2), name="x")
    assert call.exposed["x"] is named
    assert tf.identity(named) is not named
    with tf.variable_scope("net"):
        assert tf.get_variable("w", [2], tf.float32, tf.zeros_initializer()).path == "net/w"


def test_outside_of_a_model_fn():
    assert tf.group(1, 2) == (1, 2)
    assert tf.no_op() is None
    for call in (tf.trainable_variables, tf.global_variables, lambda: tf.get_collection("losses")):
        with pytest.raises(unisono.ContextError, match="model_fn"):
            call()
    with pytest.raises(unisono.ContextError, match="GradientTape"):
        tf.gradients(1.0, [])


def test_optimizers_of_tensorflow_1_train_models_of_keras():
    x, y = np.ones((8, 1), "f4"), np.ones((8, 1), "f4")
    models = []
    for optimizer in (tf.train.MomentumOptimizer(0.1, 0.0), keras.optimizers.SGD(0.1)):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(optimizer, loss="mse")
        model.fit(x, y, epochs=2, verbose=0)
        models.append(model)
    for own, other in zip(*(m.get_weights() for m in models), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6)


def test_an_operation_with_a_name_is_exposed_to_hooks():
    call = ModelCall("train", None, None)
    with entered_call(call):
        value = tf.nn.softmax(np.ones((2, 3), "f4"), name="softmax_tensor")
        tf.reduce_sum(value, name="sum")
    assert call.exposed["softmax_tensor"] is value
    assert set(call.exposed) == {"softmax_tensor"}
