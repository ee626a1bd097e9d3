"""Notes on errors of traced steps: the user's function, line and value, and what to write."""

import keras
import numpy as np
import pytest

import unisono

X = np.ones((4, 3), np.float32)
KEPT = []


@pytest.fixture(scope="module")
def one():
    return unisono.OneDeviceStrategy("cpu:0")


def notes_on(error):
    """Our notes; JAX adds one on its frames."""
    return [note for note in getattr(error.value, "__notes__", []) if note.startswith("In '")]


def decide(loss):
    if loss > 0:
        return loss
    return -loss


def convert(loss):
    return float(loss)


def to_numpy(loss):
    value = loss * 2
    return value.numpy()


def numpy_mean(loss):
    return np.mean(np.asarray(loss))


def count(n):
    return sum(i for i in range(n))


def choose(x):
    return x[x > 0]


def nested(loss):
    def inner(value):
        return int(value)

    return inner(loss)


def make_optimizer(x):
    return keras.optimizers.Adam() and x


@pytest.mark.parametrize(
    ("step", "argument", "texts"),
    [
        (
            decide,
            np.float32(1),
            ["In 'decide'", "loss > 0", "The argument `loss` (float32[])", "keras.ops.where"],
        ),
        (convert, np.float32(1), ["float(loss)", "The argument `loss` (float32[])", "float(strategy.reduce"]),
        (to_numpy, np.float32(1), ["value.numpy", "`value` (float32[])", "np.asarray(value)"]),
        (numpy_mean, X, ["np.asarray(loss)", "The argument `loss` (float32[4,3])", "in place of `numpy`"]),
        (count, np.int32(3), ["range(n)", "The argument `n` (int32[])", "pass a Python int"]),
        (choose, X, ["x[x > 0]", "The argument `x` (float32[4,3])", "keras.ops.where(mask, x, 0)"]),
        (nested, np.float32(1), ["In 'nested'", "int(value)", "The argument `value` (float32[])"]),
        (make_optimizer, X, ["keras.optimizers.Adam()", "Create it before the step"]),
    ],
)
def test_what_needs_a_value_in_a_step(one, step, argument, texts):
    for call, by in (
        (lambda: one.run(step, args=(argument,)), "strategy.run"),
        (lambda: unisono.function(step)(argument), "unisono.function"),
    ):
        with pytest.raises(Exception) as error:
            call()
        (note,) = notes_on(error)
        for text in [*texts, by, __file__]:
            assert text in note


def test_the_edges_of_a_step_in_a_function_add_one_note(one):
    function = unisono.function(lambda x: one.run(decide, args=(x,)))
    with pytest.raises(Exception, match="Attempted boolean conversion") as error:
        function(np.float32(1))
    assert len(notes_on(error)) == 1


def test_a_value_that_was_kept_from_another_step(one):
    one.run(lambda x: KEPT.append(x) or x, args=(np.float32(1),))
    with pytest.raises(Exception, match="unexpected tracer") as error:
        one.run(lambda x: KEPT[0] + x, args=(np.float32(1),))
    assert "`return` it from the step; or keep it in a `unisono.Variable`" in notes_on(error)[0]


def test_other_errors_have_no_note(one):
    with pytest.raises(KeyError) as error:
        one.run(lambda x: {}[1], args=(X,))
    assert not notes_on(error)


class Deciding(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        y = self.dense(x)
        if keras.ops.sum(y) > 0:
            return y
        return -y


def test_a_model_in_fit():
    with unisono.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = Deciding()

        model.dense.build((None, 3))
        model.built = True
        model.compile("sgd", "mse")
    with pytest.raises(Exception) as error:
        model.fit(X, X[:, :1], batch_size=4, verbose=0)
    (notes,) = notes_on(error)
    for text in ("which `fit` compiles", "keras.ops.sum(y) > 0", "`y` (float32[", "keras.ops.where"):
        assert text in notes
