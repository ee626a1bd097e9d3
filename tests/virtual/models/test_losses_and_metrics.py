"""Every loss and metric of Keras, and those that users write, against plain Keras.

Many stand in one model, one for each of its outputs, so that there is one program to compile.
"""

import functools
import inspect

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.virtual.models._zoo import CLOSE, Entry, assert_alike, numbers, trained
from tests.virtual.training._digits import mirrored

pytestmark = pytest.mark.numbers

L, ops = keras.layers, keras.ops
ROWS, BATCH = 20, 10
#: On 3 replicas, a batch does not divide.
REPLICAS = [2, pytest.param(3, marks=pytest.mark.exhaustive)]


def heads(names, activation="softmax", units=4):
    inputs = keras.Input((6,))
    hidden = L.Dense(5, activation="tanh")(inputs)
    return keras.Model(inputs, {n: L.Dense(units, activation=activation, name=n)(hidden) for n in names})


def targets(rows, integers, names):
    hot = np.eye(4, dtype="f4")[np.arange(rows) % 4]
    return {n: (np.arange(rows) % 4).astype("i4") if n in integers else hot for n in names}


INTEGERS = ("SparseCategoricalCrossentropy", "CategoricalGeneralizedCrossEntropy", "Circle")
LOSSES = {
    name: cls
    for name, cls in vars(keras.losses).items()
    if inspect.isclass(cls) and issubclass(cls, keras.Loss) and name not in ("Loss", "CTC")
}


def pairs(y, p):
    """A contrastive loss: each row is compared with all."""
    p = ops.normalize(p)
    return ops.mean(ops.logsumexp(p @ ops.transpose(p), axis=1) - ops.sum(y * p, axis=1))


def root(y, p):
    return ops.sqrt(ops.mean(ops.square(y - p)))


class Ranking(keras.Loss):
    """Not registered, and each row's value depends on the others."""

    def __init__(self, margin):
        super().__init__()
        self.margin = margin

    def call(self, y, p):
        return ops.mean(ops.relu(self.margin + p[:, None, 0] - p[None, :, 0]), axis=1)


USERS = {
    "pairs": lambda: pairs,
    "root": lambda: root,
    "ranking": lambda: Ranking(0.3),
    "total": lambda: lambda y, p: ops.sum(ops.square(y - p)),
    "average": lambda: lambda y, p: ops.mean(ops.square(y - p)),
    "rows": lambda: lambda y, p: ops.sum(ops.abs(y - p), axis=-1),
    "weighted": lambda: lambda y, p: ops.sum(y * ops.square(y - p)) / ops.sum(y * p),
}


def with_losses(losses):
    names = list(losses)

    def compiled():
        made = {n: losses[n]() for n in names}
        return {"optimizer": keras.optimizers.SGD(0.02), "loss": made}

    data = lambda rows: (numbers(rows, 6), targets(rows, INTEGERS, names))  # noqa: E731
    return Entry(lambda: heads(names), compiled, data)


@functools.cache
def by_keras(name):
    """What plain Keras trains is the same for all numbers of replicas."""
    return trained(ENTRIES[name], 0, ROWS, BATCH)


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("name", ["losses of Keras", "losses of users"])
def test_losses(name, replicas):
    assert_alike(trained(ENTRIES[name], replicas, ROWS, BATCH), by_keras(name), CLOSE)


def test_losses_of_rows_are_weighted():
    """Weights of rows, also where rows meet."""
    losses = {n: (LOSSES | USERS)[n] for n in ("MeanSquaredError", "Circle", "ranking", "rows", "average")}
    entry = with_losses(losses)
    weighted = Entry(entry.build, entry.compiled, entry.data, fit=_weights_of(list(losses)))
    assert_alike(trained(weighted, 2, 24, 12), trained(weighted, 0, 24, 12), CLOSE)


def _weights_of(names):
    return lambda rows: {"sample_weight": {n: abs(numbers(rows, seed=5)) for n in names}}


class Largest(keras.metrics.Metric):
    """Its variable is not a sum over rows."""

    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable(shape=(), initializer="zeros", name="value")

    def update_state(self, y, p, sample_weight=None):
        largest = ops.max(ops.abs(y - p))
        self.value.assign(ops.maximum(self.value.value, largest))

    def result(self):
        return ops.convert_to_tensor(self.value)


def arguments(name):
    m = {"IoU": {"num_classes": 4, "target_class_ids": [0, 2]}, "MeanIoU": {"num_classes": 4}}
    m |= {"OneHotIoU": m["IoU"], "OneHotMeanIoU": m["MeanIoU"], "TopKCategoricalAccuracy": {"k": 2}}
    m |= {n: {"recall": 0.5} for n in ("PrecisionAtRecall",)} | {"RecallAtPrecision": {"precision": 0.5}}
    m |= {"SensitivityAtSpecificity": {"specificity": 0.5}, "SpecificityAtSensitivity": {"sensitivity": 0.5}}
    return m.get(name, {})


#: They take other targets: two labels, numbers of classes on both sides, or none.
OTHERS = ("Metric", "MeanMetricWrapper", "Mean", "Sum", "MeanIoU", "IoU", "BinaryIoU")
METRICS = {
    name: cls
    for name, cls in vars(keras.metrics).items()
    if inspect.isclass(cls) and issubclass(cls, keras.Metric) and name not in OTHERS
}
USERS_METRICS = {
    "root": lambda: root,
    "average": lambda: lambda y, p: ops.mean(ops.abs(y - p)),
    "rows": lambda: lambda y, p: ops.sum(ops.abs(y - p), axis=-1),
    "largest": Largest,
}


def with_metrics(metrics):
    sparse = [n for n in metrics if n.startswith("Sparse")]
    outputs = ["hot", "sparse"]

    def compiled():
        made = {n: m(name=n, **arguments(n)) if m in METRICS.values() else m() for n, m in metrics.items()}
        each = {
            "hot": [m for n, m in made.items() if n not in sparse],
            "sparse": [made[n] for n in sparse],
        }
        loss = {"hot": "mse", "sparse": "sparse_categorical_crossentropy"}
        return {"optimizer": keras.optimizers.SGD(0.02), "loss": loss, "metrics": each}

    data = lambda rows: (numbers(rows, 6), targets(rows, ["sparse"], outputs))  # noqa: E731
    return Entry(lambda: heads(outputs), compiled, data)


ENTRIES = {
    "losses of Keras": with_losses(LOSSES),
    "losses of users": with_losses(USERS),
    "metrics of Keras": with_metrics(METRICS),
    "metrics of users": with_metrics(USERS_METRICS),
}


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # Keras' own F1Score
@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("name", ["metrics of Keras", "metrics of users"])
def test_metrics(name, replicas):
    assert_alike(trained(ENTRIES[name], replicas, ROWS, BATCH), by_keras(name), CLOSE)


# --- custom loops -----------------------------------------------------------------------------------


def shares(loss, y, p, replicas):
    strategy = mirrored(replicas)
    batch = next(iter(strategy.distribute_dataset([(y, p)])))

    def step(y, p):
        with unisono.GradientTape() as tape:
            tape.watch(p)
            value = loss(y, p)
        return value, tape.gradient(value, p)

    value, grads = strategy.run(step, args=batch)
    parts = [np.asarray(g) for g in strategy.local_results(grads)]
    return float(strategy.reduce("SUM", value, axis=None)), np.concatenate(parts)


@pytest.mark.parametrize("rows", [pytest.param(6, marks=pytest.mark.exhaustive), 7, 1])
@pytest.mark.parametrize("name", ["pairs", "root", "ranking", "total", "average", "rows"])
def test_a_loop_sums_to_one_device(name, rows):
    """Values and derivatives; 7 rows are 4 and 3, and 1 row leaves the second replica none."""
    made = USERS[name]()
    loss = made if isinstance(made, keras.Loss) else _wrapped(made)
    y, p = numbers(rows, 4), numbers(rows, 4, seed=1)
    value, grads = shares(loss, y, p, 2)
    wanted, derivative = jax.value_and_grad(lambda p: loss(y, p))(p)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(grads, derivative, rtol=1e-4, atol=1e-6)


def _wrapped(function):
    class Wrapped(keras.Loss):
        def call(self, y, p):
            return function(y, p)

    return Wrapped()


def test_local_rows_are_tf_distributes():
    y, p = numbers(6, 4), numbers(6, 4, seed=1)
    loss = unisono.nn.local_rows(_wrapped(pairs))
    value, _ = shares(loss, y, p, 2)
    np.testing.assert_allclose(
        value, sum(float(pairs(y[i : i + 3], p[i : i + 3])) for i in (0, 3)), rtol=1e-5
    )


def test_values_of_rows_without_a_reduction():
    y, p = numbers(6, 4), numbers(6, 4, seed=1)
    loss = Ranking(0.3)
    loss.reduction = "none"
    strategy = mirrored(2)
    parts = strategy.local_results(strategy.run(loss, args=next(iter(strategy.distribute_dataset([(y, p)])))))
    np.testing.assert_allclose(np.concatenate(parts), loss(y, p), rtol=1e-5)


def test_a_replica_without_rows_leaves_no_trace():
    """One row on two replicas: statistics, a metric, Adam's moments and the weights stay those of one."""

    def build():
        keras.utils.set_random_seed(1)
        layers = [L.Dense(3), L.BatchNormalization(), L.Dense(1)]
        return keras.Sequential([keras.Input((4,)), *layers]), keras.optimizers.Adam(0.1, use_ema=True)

    def trained_by(strategy, replicas):
        with strategy.scope():
            model, optimizer = build()
            metric = keras.metrics.Mean()
            optimizer.build(model.trainable_variables)

        def step(x, y):
            with unisono.GradientTape() as tape:
                loss = ops.mean(ops.square(y - model(x, training=True))) / 1.0
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            metric.update_state(loss)

        data = [(numbers(1, 4), numbers(1, 1, seed=1))] * 2
        for batch in strategy.distribute_dataset(data):
            strategy.run(step, args=batch)
        state = [*model.variables, *optimizer.variables, *metric.variables]
        return {v.path: np.asarray(v) for v in state}

    expected, found = trained_by(mirrored(1), 1), trained_by(mirrored(2), 2)
    for a, b in zip(expected.values(), found.values(), strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
