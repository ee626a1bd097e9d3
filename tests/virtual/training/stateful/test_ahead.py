"""Steps in TensorFlow's form that run ahead of Keras' loop: what they cost, and single steps' numbers."""

import re

import keras
import numpy as np
import pytest

import unisono
from tests.support import count_compiles
from tests.virtual.training.stateful._models import L, rows, weights_of
from tests.virtual.training.test_counts import HostReads
from tests.virtual.training.test_lookahead import Looks
from unisono import tf
from unisono.step._dispatch import CompiledStep
from unisono.training.groups import _batch_source, _group_size

pytestmark = pytest.mark.numbers


class Ordinary(keras.Model):
    """Its step is Keras' own."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = L.Dense(4, "tanh"), L.Dense(1)

    def call(self, x):
        return self.out(self.hidden(x))


class Stateful(Ordinary):
    """The same step in TensorFlow's form, with a counter besides what Keras knows."""

    def __init__(self):
        super().__init__()
        self.counter, self.traces = tf.Variable(0, trainable=False), 0

    def train_step(self, data):
        self.traces += 1
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.counter.assign_add(1)
        # As Keras does: a plain `update_state(loss)` counts a ragged last batch like a full one.
        self.metrics[0].update_state(loss, sample_weight=tf.shape(x)[0])
        self.metrics[1].update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    def predict_step(self, data):
        return self(data, training=False)


def made(kind=Stateful, replicas=2, **options):
    keras.utils.set_random_seed(4)
    with unisono.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]).scope():
        model = kind()
        model.compile("adam", "mse", metrics=["mae"], **options)
    return model


def data(batches):
    # 5 rows are left over.
    return rows(3, 1, count=8 * batches + 5)


def fit(model, batches=11, **options):
    x, y = data(batches)
    return model.fit(x, y, batch_size=8, shuffle=False, verbose=0, **options).history


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_numbers_are_those_of_single_steps(monkeypatch):
    """Also of Keras' own form; `predict` runs ahead, too, and the counter counts each step."""
    run_together(monkeypatch, 5)
    ahead, single, ordinary = made(), made(), made(Ordinary)
    found = [
        fit(ahead, epochs=2),
        # A callback that sees batches.
        fit(single, epochs=2, callbacks=[Looks()]),
        fit(ordinary, epochs=2),
    ]
    assert int(ahead.counter) == int(single.counter) == 24
    for history, model in zip(found[1:], (single, ordinary), strict=True):
        for name in ("loss", "mae"):
            close(found[0][name], history[name])
        close(weights_of(ahead), weights_of(model))
    # Where the training is stopped before a batch, Keras runs this one.
    for model in (ahead, ordinary):
        stop = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda *_, m=model: setattr(m, "stop_training", True)
        )
        done = int(model.optimizer.iterations)
        fit(model, callbacks=[stop])
        assert int(model.optimizer.iterations) == done + 1
    x = data(11)[0]
    predicted = ahead.predict(x, batch_size=8, verbose=0)
    close(predicted, np.asarray(ahead(x)))
    assert predicted.shape == (93, 1)


def run_together(monkeypatch, steps):
    """Let so many steps run together, whatever the machine's speed."""
    monkeypatch.setattr(_batch_source, "_PATIENCE", float("inf"))
    monkeypatch.setattr(_group_size, "_SECONDS", (-1.0, float("inf")))
    monkeypatch.setattr(_group_size, "_FIRST", steps)


def runs(monkeypatch):
    """A list that grows by the lowered form of each program that is started."""
    calls, original = [], CompiledStep.__call__

    def counted(self, donated, kept, *args):
        calls.append(self.lower(donated, kept))
        return original(self, donated, kept, *args)

    monkeypatch.setattr(CompiledStep, "__call__", counted)
    return calls


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_costs_what_an_ordinary_one_costs(monkeypatch, replicas):
    """Programs, their starts, what the host reads, and collectives; nothing is traced again."""
    run_together(monkeypatch, 6)
    costs, calls = [], runs(monkeypatch)
    for kind in (Stateful, Ordinary):
        model = made(kind, replicas)
        fit(model)
        traces = getattr(model, "traces", 0)
        calls.clear()
        counter = HostReads()
        with count_compiles() as compiled:
            fit(model, callbacks=[counter])
        # 11 batches in programs of six and of five; then the ragged one.
        reads = sum(name != "block_until_ready" for name in counter.reads)
        costs.append((len(calls), len(compiled), reads, collectives(calls[0])))
        assert model.train_function.num_programs <= 2
        assert getattr(model, "traces", 0) == traces
    assert costs[0] == costs[1]
    assert costs[0][:3] == (3, 0, 2)
    assert sum(costs[0][-1].values()) == replicas - 1


def collectives(lowered):
    """How many collectives of each kind a program has."""
    text = lowered.compile().as_text()
    kinds = ("all-reduce", "all-gather", "collective-permute", "reduce-scatter", "all-to-all")
    return {k: len(re.findall(rf" {k}(?:-start)?\(", text)) for k in kinds}


def test_steps_per_execution_are_one_program(monkeypatch):
    model, single = made(steps_per_execution=4), made()
    fit(model), fit(single)
    close(weights_of(model), weights_of(single))
    x = data(11)[0]
    close(model.predict(x, batch_size=8, verbose=0), single.predict(x, batch_size=8, verbose=0))
    calls = runs(monkeypatch)
    fit(model, batches=8)
    # Twice four batches, and the ragged one.
    assert len(calls) == 3


def test_a_step_with_a_slow_convolution_runs_alone():
    """XLA compiles the derivative of a grouped convolution to slow code in loops."""

    class Grouped(Stateful):
        def __init__(self):
            super().__init__()
            self.hidden = L.Conv2D(3, 1, groups=3)

        def build(self, shape):
            self.hidden.build((None, 1, 1, 3)), self.out.build((None, 3))

        def call(self, x):
            return self.out(tf.reshape(self.hidden(x[:, None, None, :]), (-1, 3)))

    model = made(Grouped)
    fit(model)
    assert int(model.counter) == 12
    assert not any(entry.is_used for entry in model.train_function._repeating.values())
