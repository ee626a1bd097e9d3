"""What replicas exchange in `evaluate`: once in a group of steps, and the numbers of plain Keras."""

import re

import keras
import numpy as np
import pytest

from tests.virtual.training._digits import digits, mlp
from tests.virtual.training.test_evaluate_ahead import compiled, five_together, same, started  # noqa: F401
from unisono.training.groups import _group_size
from unisono.training.groups._agreed_size import exchanges_in_loop
from unisono.training.trainer import _merge_once

pytestmark = pytest.mark.numbers

L, M = keras.layers, keras.metrics


class Total(keras.metrics.Metric):
    """Adds up something of the rows."""

    def __init__(self):
        super().__init__()
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign(self.total + keras.ops.sum(y_pred))

    def result(self):
        return keras.ops.log1p(keras.ops.abs(self.total))


class Largest(Total):
    """No sum."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign(keras.ops.maximum(self.total, keras.ops.max(y_pred)))


class Fading(Total):
    """A sum over rows, of which older steps count less: what a step adds depends on the value."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign(0.5 * self.total + keras.ops.sum(y_pred))


def row_mean(y_true, y_pred):
    return keras.ops.mean(y_pred, axis=-1)


class Noise(keras.layers.Layer):
    """Draws random numbers in evaluation, too."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def call(self, inputs):
        return inputs + keras.random.normal(keras.ops.shape(inputs), seed=self.seed)


class Counts(keras.layers.Layer):
    """Has a moving value, which evaluation changes."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.seen.assign(0.5 * self.seen + keras.ops.mean(inputs))
        return inputs


@pytest.fixture
def decisions(monkeypatch):
    """For each traced step of `evaluate`, whether it runs without exchanges."""
    found, original = [], _merge_once._apart

    def noted(*args):
        apart = original(*args)
        found.append(apart is not None)
        return apart

    monkeypatch.setattr(_merge_once, "_apart", noted)
    return found


@pytest.mark.parametrize(
    ("metrics", "is_apart"),
    [
        (lambda: ["accuracy", M.SparseTopKCategoricalAccuracy(2)], True),
        (lambda: [row_mean], True),
        (lambda: [Total()], True),
        (lambda: [Largest()], False),
        (lambda: [Fading()], False),
    ],
)
def test_metrics_are_those_of_plain_keras(metrics, is_apart, decisions):
    """Steps in groups, a ragged last one, and metrics that are no sums of independent parts."""
    x, y = (a[: 11 * 32 + 7] for a in digits())
    ours, plain = compiled(metrics=metrics()), compiled(replicas=0, metrics=metrics())
    found, expected = ([m.evaluate(x, y, verbose=0) for _ in range(2)] for m in (ours, plain))
    same(found, expected)
    assert set(decisions) == {is_apart}


def test_curves_and_matrices(decisions):
    x, y = (a[: 7 * 32] for a in digits())
    found = []
    for replicas in 2, 0:
        model = compiled(
            lambda: keras.Sequential([keras.Input((64,)), L.Dense(1, activation="sigmoid")]),
            replicas,
            loss="binary_crossentropy",
            metrics=[M.AUC(num_thresholds=20), M.Precision(), M.RootMeanSquaredError()],
        )
        found.append(model.evaluate(x, (y > 4)[:, None].astype("f4"), verbose=0))
    same(*found)
    assert set(decisions) == {True}


@pytest.mark.parametrize("layer", [L.Dropout, Noise])
def test_the_bits_do_not_depend_on_how_many_steps_run_together(layer, monkeypatch, decisions):
    x, y = (a[: 11 * 32 + 7] for a in digits())
    results = []
    for steps in 1, 3, 5:
        monkeypatch.setattr(_group_size, "_FIRST", steps)
        model = compiled(lambda: mlp(layer(0.5) if layer is L.Dropout else layer()))
        results.append([model.evaluate(x, y, verbose=0), *(v.numpy() for v in model.non_trainable_variables)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
    assert set(decisions) == {True}


def test_a_moving_value_is_merged_at_each_step(decisions):
    x, y = (a[: 10 * 32] for a in digits())
    together, apart = compiled(lambda: mlp(Counts())), compiled(lambda: mlp(Counts()))
    found = together.evaluate(x, y, verbose=0)
    for start in range(0, 10 * 32, 32):
        expected = apart.evaluate(x[start : start + 32], y[start : start + 32], verbose=0)
    assert np.isfinite([found, expected]).all()
    same(together.layers[1].seen.numpy(), apart.layers[1].seen.numpy())
    assert set(decisions) == {False}


def test_one_message_in_a_program():
    x, y = (a[: 10 * 32] for a in digits())
    model = compiled(metrics=["accuracy", M.SparseTopKCategoricalAccuracy(2)])
    function = model.make_test_function()
    programs = function._programs
    lowered, jaxprs, original = [], [], type(programs).compile

    def noting(self, key, group):
        program = original(self, key, group)
        call = type(program).__call__

        class Noting(type(program)):
            def __call__(self, donated, kept, done=None, is_result=False):
                if key.slots > 1 and not lowered:
                    lowered.append(self.lower(donated, kept).compile().as_text())
                    jaxprs.append(self.jaxpr(donated, kept))
                return call(self, donated, kept, done, is_result)

        program.__class__ = Noting
        return program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(programs), "compile", noting)
        model.evaluate(x, y, verbose=0)
    messages = re.findall(r" (all-reduce|all-gather|collective-permute|all-to-all)(?:-start)?\(", lowered[0])
    assert messages == ["all-gather"]
    assert not exchanges_in_loop(jaxprs[0])
