"""`strategy.explain`: a table of what is computed how, read from the trace."""

import keras
import numpy as np
import pytest

import unisono

L, ops = keras.layers, keras.ops


class Observer(L.Layer):
    def build(self, shape):
        self.top = self.add_weight(shape=(), initializer="zeros", trainable=False, name="top")

    def call(self, x):
        self.top.assign(ops.maximum(self.top, ops.max(x)))
        return x


def lines_of(layers, loss="mse", metrics=(), data=None, strategy=None, **options):
    strategy = strategy or unisono.MirroredStrategy(["cpu:0", "cpu:1"], **options)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), *layers()])
        model.compile("sgd", loss, metrics=metrics)
    tables = []
    strategy.explain(model, data, tables.append)
    (table,) = tables
    return table.splitlines()


def treatment(lines, part):
    (line,) = [line for line in lines if part in line.partition("  ")[0] + " "]
    return line.partition("  ")[2].strip()


def test_each_part_has_a_line():
    data = np.zeros((4, 6), "f4"), np.zeros((4, 2), "f4")
    lines = lines_of(
        lambda: [Observer(name="observer"), L.BatchNormalization(name="bn"), L.Dense(2), L.Dropout(0.5)],
        data=data,
        metrics=["mae"],
    )
    assert lines[0].split() == ["part", "on", "2", "replicas", "because"]
    assert treatment(lines, "bn ").startswith("with the rows of one replica")
    assert treatment(lines, "3 other layers").startswith("by each replica for its rows")
    assert treatment(lines, "observer/top").startswith("the largest of the replicas' values")
    assert treatment(lines, "bn/moving_mean").startswith("the mean over the replicas")
    assert "random stream" in "".join(lines)
    assert "added up over the replicas" in treatment(lines, "loss ")
    assert treatment(lines, "metrics").startswith("added up over the replicas")


def test_what_relates_rows_is_named():
    centered = lambda: [L.Lambda(lambda t: t - ops.mean(t, axis=0), name="centered")]  # noqa: E731
    lines = lines_of(centered)
    assert "centered: a difference" in treatment(lines, "output")
    assert treatment(lines, "rows of a batch").startswith("one program, divided by XLA")
    lines = lines_of(centered, state_layout="sharded")
    assert treatment(lines, "rows of a batch").startswith("every replica computes all rows")


def test_a_loss_of_pairs_gets_the_rows_of_all_replicas():
    data = np.zeros((4, 6), "f4"), np.zeros(4, "int32")
    lines = lines_of(lambda: [L.Dense(3)], loss=keras.losses.Circle(), data=data)
    assert treatment(lines, "loss circle").startswith("with the rows of all replicas")


def test_a_metric_along_the_rows_gets_those_of_all_replicas():
    data = np.zeros((4, 6), "f4"), np.zeros((4, 2), "f4")
    layers = lambda: [L.Dense(2)]  # noqa: E731
    for axis, treated in [(0, "from the rows of all replicas"), (-1, "added up over the replicas")]:
        lines = lines_of(layers, data=data, metrics=[keras.metrics.CosineSimilarity(axis=axis)])
        assert treatment(lines, "metrics").startswith(treated)


def test_other_models():
    (line,) = lines_of(lambda: [L.Dense(2)], strategy=unisono.OneDeviceStrategy("cpu:0"))
    assert "one replica computes all rows" in line
    strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([L.Dense(2)])
    with pytest.raises(unisono.InvalidArgumentError, match="Pass a few rows"):
        strategy.explain(model)
    fixed = []
    with strategy.scope():
        model = keras.Sequential([keras.Input(batch_shape=(4, 5, 3)), L.LSTM(2, stateful=True)])
    strategy.explain(model, print_fn=fixed.append)
    assert "every replica computes all rows" in fixed[0]
