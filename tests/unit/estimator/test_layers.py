"""Layers are Keras' with TensorFlow 1's arguments; names say which of them are the same."""

import inspect

import keras
import numpy as np
import pytest

import unisono
from unisono.estimator import layers, losses
from unisono.estimator._train_op import ModelCall, entered_call

CLASSES = [
    "BatchNormalization",
    "Conv1D",
    "Conv2D",
    "Conv2DTranspose",
    "Conv3D",
    "Conv3DTranspose",
    "Dense",
    "Dropout",
    "Flatten",
    "MaxPooling1D",
    "MaxPooling2D",
    "MaxPooling3D",
    "AveragePooling1D",
    "AveragePooling2D",
    "AveragePooling3D",
    "SeparableConv1D",
    "SeparableConv2D",
]

#: A function, its arguments, and the class of Keras with the same arguments.
CALLS = [
    ("dense", {"units": 4, "activation": "relu", "bias_initializer": "ones"}, "Dense", (2, 3)),
    ("conv1d", {"filters": 4, "kernel_size": 3, "strides": 2}, "Conv1D", (2, 9, 3)),
    ("conv2d", {"filters": 4, "kernel_size": (3, 2), "padding": "same"}, "Conv2D", (2, 8, 8, 3)),
    ("conv3d", {"filters": 2, "kernel_size": 2, "use_bias": False}, "Conv3D", (1, 4, 4, 4, 2)),
    ("conv2d_transpose", {"filters": 4, "kernel_size": 2, "strides": 2}, "Conv2DTranspose", (2, 4, 4, 3)),
    ("conv3d_transpose", {"filters": 4, "kernel_size": 2}, "Conv3DTranspose", (1, 2, 2, 2, 3)),
    ("separable_conv1d", {"filters": 4, "kernel_size": 3}, "SeparableConv1D", (2, 8, 3)),
    (
        "separable_conv2d",
        {"filters": 4, "kernel_size": 3, "depth_multiplier": 2},
        "SeparableConv2D",
        (2, 8, 8, 3),
    ),
    ("max_pooling1d", {"pool_size": 2, "strides": 2}, "MaxPooling1D", (2, 8, 3)),
    ("max_pooling2d", {"pool_size": 2, "strides": 1}, "MaxPooling2D", (2, 8, 8, 3)),
    ("max_pooling3d", {"pool_size": 2, "strides": 2}, "MaxPooling3D", (1, 4, 4, 4, 3)),
    ("average_pooling1d", {"pool_size": 2, "strides": 2}, "AveragePooling1D", (2, 8, 3)),
    (
        "average_pooling2d",
        {"pool_size": 3, "strides": 2, "padding": "same"},
        "AveragePooling2D",
        (2, 8, 8, 3),
    ),
    ("average_pooling3d", {"pool_size": 2, "strides": 2}, "AveragePooling3D", (1, 4, 4, 4, 3)),
    ("flatten", {}, "Flatten", (2, 4, 3)),
]


@pytest.fixture
def call():
    with entered_call(ModelCall("train", None, None)) as call:
        yield call


@pytest.mark.parametrize(("name", "arguments", "cls", "shape"), CALLS)
def test_functions_compute_what_keras_computes(name, arguments, cls, shape):
    x = np.random.default_rng(0).normal(size=shape).astype("f4")
    keras.utils.set_random_seed(3)
    found = getattr(layers, name)(x, **arguments)
    keras.utils.set_random_seed(3)
    np.testing.assert_array_equal(found, getattr(keras.layers, cls)(**arguments)(x))


@pytest.mark.parametrize("name", CLASSES)
def test_classes_are_keras_layers(name):
    cls = getattr(layers, name)
    assert issubclass(cls, getattr(keras.layers, name))
    required = [p.name for p in inspect.signature(cls).parameters.values() if p.default is p.empty]
    layer = cls(**dict.fromkeys(required, 2), name="own")
    assert layer.name == "own"


def test_arguments_are_in_the_order_of_tensorflow():
    x = np.ones((2, 8, 8, 3), "f4")
    assert layers.conv2d(x, 4, 3, 2, "same", "channels_last", 1, keras.ops.relu).shape == (2, 4, 4, 4)
    assert layers.max_pooling2d(inputs=x, pool_size=[2, 2], strides=2).shape == (2, 4, 4, 3)
    assert layers.dense(x, 4, None, False).shape == (2, 8, 8, 4)
    assert layers.Dense(4, kernel_initializer=None)(x).shape == (2, 8, 8, 4)
    assert layers.Dense(1).apply(x).shape == (2, 8, 8, 1)
    assert list(inspect.signature(layers.dense).parameters)[:3] == ["inputs", "units", "activation"]
    with pytest.raises(TypeError, match="unit"):
        layers.dense(x, unit=4)


def test_normalization_and_dropout_do_what_training_says():
    x = np.random.default_rng(0).normal(3, 2, (64, 3)).astype("f4")
    layer = layers.BatchNormalization(momentum=0.5)
    np.testing.assert_allclose(np.mean(layer(x, training=True), 0), 0, atol=1e-5)
    np.testing.assert_allclose(layer.moving_mean.value, x.mean(0) / 2, rtol=1e-5)
    np.testing.assert_array_equal(layers.batch_normalization(x, epsilon=0.0), x)
    assert np.mean(layers.dropout(x, 0.25, training=True) == 0) == pytest.approx(0.25, abs=0.1)
    np.testing.assert_array_equal(layers.dropout(x, 0.25), x)


def test_a_normalization_that_is_not_trained_still_takes_the_batch():
    x = np.random.default_rng(0).normal(3, 2, (64, 3)).astype("f4")
    layer = layers.BatchNormalization(axis=[1], trainable=False)
    np.testing.assert_allclose(np.mean(layer(x, training=True), 0), 0, atol=1e-5)
    assert layer.trainable_variables == []


@pytest.mark.parametrize("arguments", [{"renorm": True}, {"virtual_batch_size": 8}, {"adjustment": print}])
def test_what_keras_normalization_lacks(arguments):
    with pytest.raises(unisono.UnsupportedError, match=next(iter(arguments))):
        layers.BatchNormalization(**arguments)


# --- names ---------------------------------------------------------------------------------------------


def test_a_name_is_used_again_where_reuse_says_so(call):
    x = np.ones((2, 3), "f4")
    first = layers.dense(x, 4, name="d")
    with pytest.raises(unisono.InvalidArgumentError, match="second one"):
        layers.dense(x, 4, name="d")
    np.testing.assert_array_equal(layers.dense(x, 4, name="d", reuse=True), first)
    assert layers.dense(x, 4, name="e", reuse=layers.AUTO_REUSE).shape == (2, 4)
    with pytest.raises(unisono.InvalidArgumentError, match="not made before"):
        layers.dense(x, 4, name="f", reuse=True)
    with pytest.raises(unisono.InvalidArgumentError, match="must have a name"):
        layers.dense(x, 4, reuse=True)
    with pytest.raises(unisono.InvalidArgumentError, match="which is a Dense"):
        layers.conv1d(x, 4, 1, name="d", reuse=True)
    assert sorted(call.extras["collections"].named) == ["d", "e"]


def test_reuse_outside_of_a_model_fn():
    with pytest.raises(unisono.ContextError, match="model_fn"):
        layers.dense(np.ones((2, 3), "f4"), 4, name="d", reuse=True)


def test_a_scope_that_is_entered_again_has_the_same_layers(call):
    x = np.ones((2, 3), "f4")

    def network(reuse=None):
        with layers.variable_scope("net", reuse=reuse):
            return layers.dense(layers.dense(x, 4), 2)

    first = network()
    np.testing.assert_array_equal(network(reuse=True), first)
    np.testing.assert_array_equal(network(reuse=layers.AUTO_REUSE), first)
    with pytest.raises(unisono.InvalidArgumentError, match="'net/dense'"):
        network()
    found = call.extras["collections"].named
    assert sorted(found) == ["net/dense", "net/dense_1"]
    assert found["net/dense_1"].kernel.path == "net/dense_1/kernel"


def test_scopes_in_scopes(call):
    with layers.variable_scope("a") as outer, layers.variable_scope("b/c") as inner:
        assert (outer.name, inner.name, layers.get_variable_scope()) == ("a", "a/b/c", inner)
        layer = layers.get_variable("w", [2], initializer="ones")
        assert layer.path == "a/b/c/w"
        inner.reuse_variables()
        assert layers.get_variable("w", [2]) is layer
    with layers.variable_scope(inner, reuse=True):
        assert layers.get_variable("w", [2]) is layer
    with layers.variable_scope(None, "x"), layers.variable_scope(None, "y") as inner:
        assert inner.name == "x/y"
        with (
            pytest.raises(unisono.InvalidArgumentError, match="Leave that one"),
            layers.variable_scope(outer),
        ):
            pass
    assert layers.get_variable_scope().name == ""
    for arguments in ([None], ["a", None, None, "zeros"]):
        with pytest.raises(unisono.InvalidArgumentError), layers.variable_scope(*arguments):
            pass


def test_variables(call):
    assert layers.get_variable("a", initializer=np.arange(3.0, dtype="f4")).shape == (3,)
    variable = layers.get_variable("b", [2, 3], trainable=False)
    assert (variable.path, variable.trainable, variable.shape) == ("b", False, (2, 3))
    with pytest.raises(unisono.InvalidArgumentError, match="'b'"):
        layers.get_variable("b", [2, 3])
    with pytest.raises(unisono.InvalidArgumentError, match="add_loss"):
        layers.get_variable("c", [2], regularizer=keras.regularizers.L2(0.1))


def test_regularizers_of_layers_count_in_losses(call):
    x = np.ones((2, 3), "f4")
    for _ in range(2):
        layers.dense(
            x, 1, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(0.5), name="d",
            reuse=layers.AUTO_REUSE,
        )  # fmt: skip
    layers.Dense(1, bias_initializer="ones", bias_regularizer=keras.regularizers.L2(0.25))(x)
    keras.layers.Dense(1, kernel_regularizer="l2")(x)
    assert [float(loss) for loss in losses.get_regularization_losses()] == [1.5, 0.25]
    losses.mean_squared_error([1.0], [2.0])
    assert float(losses.get_total_loss()) == 2.75
    assert float(losses.get_total_loss(add_regularization_losses=False)) == 1.0
