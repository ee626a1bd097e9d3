"""Callbacks that see single batches, while steps run ahead of them: all is as with steps one by one."""

import functools

import jax
import keras
import numpy as np
import pytest

from tests.virtual.training._digits import crossentropy, digits, mirrored, mlp
from unisono.step._dispatch import CompiledStep
from unisono.training.groups import _batch_source, _group_size
from unisono.training.trainer import _run_ahead_of_loop, _speculation

_STEPS = 23


@pytest.fixture(autouse=True)
def five_together(monkeypatch):
    """Whatever the machine's speed; and few steps alone."""
    monkeypatch.setattr(_group_size, "_FIRST", 5)
    monkeypatch.setattr(_group_size, "_SECONDS", (-1.0, float("inf")))
    monkeypatch.setattr(_batch_source, "_PATIENCE", float("inf"))
    monkeypatch.setattr(_speculation, "_PATIENCE", 3)


@pytest.fixture
def started(monkeypatch):
    """Programs that were started."""
    programs, original = [], CompiledStep.__call__

    def counting(self, donated, kept, done=None, is_result=False):
        programs.append(self)
        return original(self, donated, kept, done, is_result)

    monkeypatch.setattr(CompiledStep, "__call__", counting)
    return programs


def compiled(replicas=2, *layers, together=1):
    keras.utils.set_random_seed(5)
    with mirrored(replicas).scope():
        model = mlp(*(layer() for layer in layers))
        model.compile("adam", crossentropy(), metrics=["accuracy"], steps_per_execution=together)
    return model


class Sees(keras.callbacks.Callback):
    """Reads logs alone."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((batch, logs["loss"], logs["accuracy"]))


class ReadsEach(Sees):
    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        self.seen.append([w.copy() for w in self.model.get_weights()])
        self.seen.append(int(self.model.optimizer.iterations.numpy()))


class ReadsSome(ReadsEach):
    def on_train_batch_end(self, batch, logs=None):
        if batch in (2, 6, 17):
            super().on_train_batch_end(batch, logs)


class ReadsBefore(Sees):
    def on_train_batch_begin(self, batch, logs=None):
        super().on_train_batch_begin(batch, logs)
        if batch in (0, 3, 11):
            self.seen.append(self.model.get_weights())


class SetsRate(Sees):
    def on_train_batch_begin(self, batch, logs=None):
        if batch % 7 == 4:
            self.model.optimizer.learning_rate = 0.01 / (batch + 1)


class ResetsWeights(Sees):
    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        if batch == 8:
            self.model.set_weights([w * 0.5 for w in self.model.get_weights()])


class Evaluates(Sees):
    """An evaluation resets the metrics of the training."""

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        if batch in (6, 8):
            x, y = digits()
            self.seen.append(self.model.evaluate(x[:96], y[:96], verbose=0))


class Fits(Sees):
    """Trains while `fit` runs, from the same function."""

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        if batch in (3, 5):
            x, y = digits()
            self.model.fit(x[:64], y[:64], batch_size=32, verbose=0, shuffle=False)


class FitsOneBatch(Sees):
    """Trains on a batch of its own, with the function that has run ahead."""

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        if batch in (3, 4, 8, 15):
            x, y = digits()
            self.seen.append(self.model.train_on_batch(-x[:32], y[:32]))


class Stops(Sees):
    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        if batch in (7, 8):
            self.model.stop_training = True


def trained(callback, replicas=2, rows=32 * _STEPS, epochs=2, layers=(), together=1, **options):
    x, y = digits()
    x, y = np.concatenate([x, x])[:rows], np.concatenate([y, y])[:rows]
    model = compiled(replicas, *layers, together=together)
    history = model.fit(x, y, batch_size=32, epochs=epochs, verbose=0, callbacks=[callback], **options)
    state = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    return state, history.history, callback.seen


def one_by_one(monkeypatch, *args, **kwargs):
    with monkeypatch.context() as patch:
        patch.setattr(_run_ahead_of_loop, "can_speculate", lambda *args, **kwargs: False)
        return trained(*args, **kwargs)


def same(found, expected):
    for a, b in zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True):
        # Two programs: rounding differs.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


_KINDS = [
    Sees, ReadsEach, ReadsSome, ReadsBefore, SetsRate, ResetsWeights, Evaluates, Fits, FitsOneBatch, Stops,
]  # fmt: skip


@pytest.mark.parametrize("kind", _KINDS)
def test_callbacks_see_and_do_what_they_would_one_by_one(kind, monkeypatch):
    same(trained(kind()), one_by_one(monkeypatch, kind()))


def several(*kinds):
    """One case for `make test`, and the others for `make test-all`."""
    return [kinds[0], *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in kinds[1:])]


@pytest.mark.parametrize(
    "kind", several(ResetsWeights, *(kind for kind in _KINDS if kind is not ResetsWeights))
)
def test_steps_per_execution(kind, monkeypatch):
    """Calls of three steps, which end within groups of five and behind them; 23 steps are no multiple."""
    expected = one_by_one(monkeypatch, kind(), together=3)
    same(trained(kind(), together=3), expected)


@pytest.mark.parametrize(
    "options",
    several({"rows": 32 * 7 + 9}, {"rows": 31 * 5}, {"steps_per_epoch": 5}, {"steps_per_epoch": 22}),
)
def test_epochs_that_are_no_multiple_of_steps_per_execution(options, monkeypatch):
    expected = one_by_one(monkeypatch, ReadsSome(), together=3, **options)
    same(trained(ReadsSome(), together=3, **options), expected)


@pytest.mark.parametrize("rows", [32 * 7 + 9, 31 * 5])
def test_ragged_batches(rows, monkeypatch):
    same(trained(ReadsSome(), rows=rows), one_by_one(monkeypatch, ReadsSome(), rows=rows))


def test_dropout_and_moving_statistics(monkeypatch):
    layers = functools.partial(keras.layers.Dropout, 0.3, seed=3), keras.layers.BatchNormalization
    expected = one_by_one(monkeypatch, ReadsSome(), layers=layers)
    same(trained(ReadsSome(), layers=layers), expected)


def test_a_state_read_between_two_steps_is_that_of_the_same_program():
    """To the last bit: the group's program runs again up to the step."""

    class Reads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                self.read = self.model.get_weights()

    x, y = digits()
    reads, expected = Reads(), compiled()
    compiled().fit(x[:352], y[:352], batch_size=32, verbose=0, shuffle=False, callbacks=[reads])
    expected.fit(x[:128], y[:128], batch_size=32, verbose=0, shuffle=False)
    for a, b in zip(reads.read, expected.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_steps_run_ahead_of_a_callback_that_reads_logs(started):
    trained(Sees(), epochs=1)
    # Five batches in each.
    assert len(started) == 5


def test_steps_run_ahead_with_steps_per_execution_too(started):
    trained(Sees(), epochs=1, together=2)
    # As many as without it.
    assert len(started) == 5


def test_a_callback_that_changes_each_state_costs_few_programs(started):
    class Changes(Sees):
        def on_train_batch_end(self, batch, logs=None):
            self.model.optimizer.learning_rate = 1e-3 / (batch + 1)

    trained(Changes(), epochs=1)
    # Those of single steps, and two discarded ones.
    assert len(started) <= _STEPS + 3


def test_a_callback_that_reads_often_costs_few_programs(started):
    trained(ReadsEach(), epochs=1)
    assert len(started) <= _STEPS + 3


@pytest.mark.parametrize("together", [1, 2])
def test_an_error_of_a_callback_leaves_the_state_of_its_batch(together, monkeypatch):
    class Raises(Sees):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 7:
                raise OSError("the log is gone")

    x, y = digits()
    model = compiled(together=together)
    with pytest.raises(OSError, match="the log is gone"):
        model.fit(x[:352], y[:352], batch_size=32, verbose=0, shuffle=False, callbacks=[Raises()])
    assert int(model.optimizer.iterations.numpy()) == 8
    expected = compiled()
    expected.fit(x[:256], y[:256], batch_size=32, verbose=0, shuffle=False)
    same(model.get_weights(), expected.get_weights())


def test_a_large_state_is_not_kept(monkeypatch, started):
    monkeypatch.setattr(_speculation, "_LARGEST_STATE", 100)
    trained(Sees(), epochs=1)
    assert len(started) >= _STEPS


def test_a_step_that_prints_runs_once(capfd):
    class Prints(keras.layers.Layer):
        def call(self, x):
            jax.debug.print("one step")
            return x

    trained(Stops(), replicas=1, epochs=1, layers=(Prints,))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("one step") == 8


def test_a_generator_may_depend_on_a_callback(started):
    """So that nothing is taken from it ahead."""
    x, y = digits()
    taken, sees = [], Sees()

    def batches():
        for i in range(6):
            taken.append(len(sees.seen))
            yield x[32 * i : 32 * i + 32], y[32 * i : 32 * i + 32]

    compiled().fit(batches(), steps_per_epoch=6, shuffle=False, verbose=0, callbacks=[sees])
    # Keras takes the first two to learn their shapes; each other when the one before has ended.
    assert taken == [0, 0, 5, 7, 9, 11]
    assert len(started) == 6


def test_an_evaluation_stops_at_its_batch():
    class StopsTest(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_test_batch_end(self, batch, logs=None):
            self.seen.append(logs["loss"])
            if batch == 6:
                self.model.stop_evaluating = True

    x, y = digits()
    stops = StopsTest()
    found = compiled().evaluate(x[:352], y[:352], verbose=0, callbacks=[stops])
    same(found, compiled().evaluate(x[:224], y[:224], verbose=0))
    assert len(stops.seen) == 7
