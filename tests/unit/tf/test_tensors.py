"""Tensors, contexts, random numbers and images with TensorFlow's names."""

import jax
import numpy as np
import pytest

import unisono
from unisono import UnisonoError, tf


def test_arrays_have_numpy_and_tracers_do_not():
    assert isinstance(tf.constant([1.0]).numpy(), np.ndarray)

    @jax.jit
    def traced(x):
        assert not hasattr(x, "numpy")
        return x

    traced(1.0)


@pytest.mark.parametrize(
    ("made", "dtype", "shape"),
    [
        (lambda: tf.constant(1), "int32", ()),
        (lambda: tf.constant([1.5]), "float32", (1,)),
        (lambda: tf.constant(True), "bool", ()),
        (lambda: tf.constant(2, shape=[2, 3], dtype=tf.float32), "float32", (2, 3)),
        (lambda: tf.constant([1, 2, 3, 4], shape=[2, 2]), "int32", (2, 2)),
        (lambda: tf.constant(unisono.Variable(3.0)), "float32", ()),
        (lambda: tf.convert_to_tensor(np.zeros((2, 0), "uint8")), "uint8", (2, 0)),
    ],
)
def test_constants(made, dtype, shape):
    assert (str(made().dtype), made().shape) == (dtype, shape)


@pytest.mark.parametrize("value", ["text", b"text", ["a", "b"], np.array(["a"])])
def test_strings_are_no_tensors(value):
    with pytest.raises(UnisonoError, match="numbers or booleans"):
        tf.constant(value)


def test_eager_or_not():
    assert tf.executing_eagerly()
    assert not tf.inside_function()
    seen = []
    jax.jit(lambda x: seen.append(tf.executing_eagerly()) or x)(1.0)
    assert seen == [False]


def test_a_signature_and_a_shape():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, name="x")])
    def double(x):
        return 2 * x

    assert double(tf.constant([1.0, 2.0])).numpy().tolist() == [2.0, 4.0]
    assert tf.TensorShape([None, 3]) == (None, 3)
    assert tf.TensorShape(None) is None


def test_a_module_lists_its_variables():
    class MyModel(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable(1.0)
            self.rest = {"b": [tf.Variable(2.0, trainable=False)]}
            self.again = self.w
            self.layer = tf.keras.layers.Dense(2)
            self.layer.build((None, 3))

    model = MyModel()
    assert model.name == "my_model"
    assert len(model.variables) == 4
    assert len(model.trainable_variables) == 3


def test_contexts():
    with tf.device("/cpu:0"), tf.name_scope("part"), tf.control_dependencies([tf.no_op()]):
        assert tf.constant(1).numpy() == 1
    with tf.device("/job:worker/replica:0/task:1/device:CPU:0"):
        assert next(iter(tf.constant(1).devices())).platform == "cpu"
    with pytest.raises(UnisonoError, match="There are"):
        tf.device("/gpu:7")


def test_printing(capfd):
    tf.print("x:", tf.constant([1, 2]))

    @tf.function
    def traced(x):
        tf.print("in {braces}", x)
        return x

    traced(tf.constant(3))
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == ["x: [1 2]", "in {braces} 3"]


def test_a_gradient_of_its_own():
    @tf.custom_gradient
    def clipped(x, y):
        return x * y, lambda upstream: (upstream * 0, upstream * 7)

    assert jax.grad(clipped, (0, 1))(2.0, 3.0) == (0.0, 7.0)


def test_random_numbers():
    assert tf.random.normal([3, 2], mean=100.0).numpy().mean() > 90
    assert tf.random.uniform((4,), maxval=3, dtype=tf.int32).dtype == "int32"
    assert abs(tf.random.truncated_normal([100]).numpy()).max() <= 2
    assert (tf.random.normal([3], seed=1).numpy() == tf.random.normal([3], seed=1).numpy()).all()
    tf.random.set_seed(5)
    first = tf.random.uniform([3]).numpy()
    tf.random.set_seed(5)
    assert (tf.random.uniform([3]).numpy() == first).all()


def test_random_images():
    picture = np.arange(2 * 4 * 6 * 3, dtype="float32").reshape(2, 4, 6, 3)
    flipped = tf.image.random_flip_left_right(picture, seed=1).numpy()
    for ours, theirs in zip(flipped, picture, strict=True):
        assert (ours == theirs).all() or (ours == theirs[:, ::-1]).all()
    piece = tf.image.random_crop(picture[0], [2, 3, 3], seed=4).numpy()
    places = [(i, j) for i in range(3) for j in range(4) if (picture[0, i : i + 2, j : j + 3] == piece).all()]
    assert len(places) == 1
