"""`evaluate` and `predict` ahead of Keras' loop: the same numbers, errors and batches as plain Keras."""

import contextlib

import keras
import numpy as np
import pytest

from tests.support import count_host_reads
from tests.virtual.training._digits import crossentropy, digits, mirrored, mlp
from unisono.step._dispatch import CompiledStep
from unisono.training.groups import _batch_source, _group_size, _lookahead, _multi_step

L = keras.layers


@pytest.fixture(autouse=True)
def five_together(monkeypatch):
    """Whatever the machine's speed."""
    monkeypatch.setattr(_group_size, "_FIRST", 5)
    monkeypatch.setattr(_group_size, "_SECONDS", (-1.0, float("inf")))
    monkeypatch.setattr(_batch_source, "_PATIENCE", float("inf"))


@pytest.fixture
def started(monkeypatch):
    """Programs that were started."""
    programs, original = [], CompiledStep.__call__

    def counting(self, donated, kept, done=None, is_result=False):
        programs.append(self)
        return original(self, donated, kept, done, is_result)

    monkeypatch.setattr(CompiledStep, "__call__", counting)
    return programs


def two_outputs():
    inputs = keras.Input((64,))
    hidden = L.Dense(16, activation="relu")(inputs)
    return keras.Model(inputs, {"a": L.Dense(10)(hidden), "b": L.Softmax()(L.Dense(3)(hidden))})


class OwnSteps(keras.Model):
    """Returns two predictions, and loses nothing else."""

    def test_step(self, state, data):
        return super().test_step(state, data)

    def predict_step(self, state, data):
        outputs, non_trainable = super().predict_step(state, data)
        return (outputs, {"best": keras.ops.argmax(outputs, -1)}), non_trainable


def own_steps():
    inputs = keras.Input((64,))
    return OwnSteps(inputs, L.Dense(10)(inputs))


def compiled(build=mlp, replicas=2, **changes):
    """The same model on replicas; plain Keras for none."""
    keras.utils.set_random_seed(5)
    with mirrored(replicas).scope() if replicas else contextlib.nullcontext():
        model = build()
        model.compile(**{"optimizer": "sgd", "loss": crossentropy(), "metrics": ["accuracy"], **changes})
    model.build((None, 64))
    return model


def same(found, expected):
    for a, b in zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True):
        assert np.shape(a) == np.shape(b)
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "batch_size"), [(352, 32), (300, 32), (275, 25), (7, 32)])
def test_numbers_are_those_of_plain_keras(rows, batch_size):
    """Batches that divide, a ragged last one, ones that are filled up, one that is smaller."""
    x, y = (a[:rows] for a in digits())
    ours, plain = compiled(), compiled(replicas=0)
    for _ in range(2):  # the second time from metrics that hold a result
        for model in ours, plain:
            model.results = [
                model.evaluate(x, y, batch_size=batch_size, verbose=0),
                model.evaluate(x, y, batch_size=batch_size, verbose=0, return_dict=True),
                model.predict(x, batch_size=batch_size, verbose=0),
            ]
        same(ours.results, plain.results)
    assert ours.results[1].keys() == plain.results[1].keys()
    assert type(ours.results[2]) is np.ndarray


def test_twelve_batches_are_three_programs(started):
    x, y = (a[: 12 * 32] for a in digits())
    model = compiled()
    for call in (lambda: model.evaluate(x, y, verbose=0), lambda: model.predict(x, verbose=0)):
        call()
        started.clear()
        call()
        assert len(started) == 3


def test_the_host_waits_for_no_batch():
    """For the results alone, and for programs with two more behind them."""
    x, y = (a[: 24 * 32] for a in digits())
    model = compiled()
    for name in "evaluate", "predict":
        arguments = (x, y) if name == "evaluate" else (x,)
        getattr(model, name)(*arguments, verbose=0)
        few, many = [], []
        for reads, batches in (few, 11), (many, 21):
            with count_host_reads() as seen:
                getattr(model, name)(*(a[: batches * 32] for a in arguments), verbose=0)
            reads.extend(name for name in seen if name != "block_until_ready")
        if name == "evaluate":
            assert len(many) == len(few)
        else:
            # Two more programs, each with one array on two devices.
            assert len(many) <= len(few) + 2 * 2


def test_predictions_are_fetched_while_programs_run(monkeypatch):
    x = digits()[0][: 30 * 32]
    held, original = [], _lookahead.StepLookahead.queue_predictions

    def queue(self, outputs, count):
        first = original(self, outputs, count)
        held.append(len(self._on_devices))
        return first

    monkeypatch.setattr(_lookahead.StepLookahead, "queue_predictions", queue)
    compiled().predict(x, verbose=0)
    assert max(held) == _group_size.IN_FLIGHT


def test_large_predictions_share_programs_with_fewer(monkeypatch, started):
    """The bytes of predictions are bounded as those of batches are."""
    monkeypatch.setattr(_multi_step, "_BYTES", 32 * 64 * 8 * 4)
    x = digits()[0][: 12 * 32]

    def wide():
        return keras.Sequential([keras.Input((64,)), L.Dense(64 * 4)])

    model, plain = compiled(wide), compiled(wide, replicas=0)
    same(model.predict(x, verbose=0), plain.predict(x, verbose=0))
    slots = {key.slots for key in model.predict_function._programs}
    assert slots == {1, 2}


@pytest.mark.parametrize("build", [two_outputs, own_steps])
def test_structures_and_own_steps(build, started):
    x, y = (a[: 11 * 32] for a in digits())
    losses = {"a": crossentropy(), "b": None} if build is two_outputs else crossentropy()
    found = []
    for replicas in 2, 0:
        model = compiled(build, replicas, loss=losses, metrics=None)
        targets = {"a": y, "b": y} if build is two_outputs else y
        found.append((model.evaluate(x, targets, verbose=0, return_dict=True), model.predict(x, verbose=0)))
    same(*found)
    assert keras.tree.assert_same_structure(*found) is None
    assert len(started) < 11


class Batches:
    """Endless batches; counts how many were taken."""

    def __init__(self, ends=None, raises=None):
        self.ends, self.raises, self.taken = ends, raises, 0

    def __iter__(self):
        x, y = digits()
        while self.taken != self.ends:
            if self.taken == self.raises:
                raise OSError("the disk is gone")
            start = self.taken * 7 % 500
            self.taken += 1
            yield x[start : start + 32], y[start : start + 32]


def test_an_endless_source_gives_no_more_than_steps():
    found = []
    for model in compiled(), compiled(replicas=0):
        source = Batches()
        numbers = model.evaluate(iter(source), steps=7, verbose=0)
        found.append((numbers, model.predict(iter(source), steps=13, verbose=0), source.taken))
    same(*found)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_data_without_a_known_end():
    found = []
    for model in compiled(), compiled(replicas=0):
        numbers = model.evaluate(iter(Batches(ends=13)), verbose=0)
        found.append((numbers, model.predict(iter(Batches(ends=6)), verbose=0)))
    same(*found)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_an_error_in_the_data_is_raised_and_the_model_works_on(name):
    model = compiled()
    before = model.get_weights()
    with pytest.raises(OSError, match="the disk is gone"):
        getattr(model, name)(iter(Batches(raises=7)), verbose=0)
    same(model.get_weights(), before)
    x, y = (a[:96] for a in digits())
    same(model.evaluate(x, y, verbose=0), compiled(replicas=0).evaluate(x, y, verbose=0))


@pytest.mark.parametrize("name", ["evaluate", "predict"])
@pytest.mark.parametrize("at", [0, 3, 8])
def test_an_interrupt_leaves_whole_weights(name, at, monkeypatch):
    model = compiled(lambda: mlp(L.BatchNormalization()))
    x, y = (a[: 11 * 32] for a in digits())
    calls, original = [], _lookahead.StepLookahead.next_logs

    def interrupted(self):
        calls.append(self)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        return original(self)

    before = model.get_weights()
    with monkeypatch.context() as patch:
        patch.setattr(_lookahead.StepLookahead, "next_logs", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(model, name)(*((x, y) if name == "evaluate" else (x,)), verbose=0)
    same(model.get_weights(), before)
    assert getattr(model, "test_function" if name == "evaluate" else "predict_function").lookahead is None
    assert model.predict(x, verbose=0).shape == (11 * 32, 10)


def test_who_looks_at_batches_gets_them_one_by_one(started):
    class Looks(keras.callbacks.Callback):
        def __init__(self, safe=False):
            super().__init__()
            self.async_safe, self.seen = safe, []

        def on_test_batch_end(self, batch, logs=None):
            self.seen.append((batch, logs["loss"]))

        def on_predict_batch_end(self, batch, logs=None):
            self.seen.append((batch, np.asarray(logs["outputs"])))

    x, y = (a[: 11 * 32] for a in digits())
    ours, plain, safe = Looks(), Looks(), Looks(safe=True)
    models = compiled(), compiled(replicas=0), compiled()
    counts = []
    for model, callback in zip(models, (ours, plain, safe), strict=True):
        for name, arguments in ("evaluate", (x, y)), ("predict", (x,)):
            started.clear()
            getattr(model, name)(*arguments, verbose=0, callbacks=[callback])
            counts.append(len(started))
    # An evaluation runs ahead of what may read the state; predictions are no logs.
    assert counts == [3, 11, 0, 0, 3, 11]
    same(ours.seen, plain.seen)
    same(sorted(safe.seen[:11]), ours.seen[:11])


def test_validation_in_fit_runs_ahead_with_its_own_batch_size(started):
    x, y = digits()
    histories = []
    for replicas in 2, 0:
        model = compiled(replicas=replicas)
        started.clear()
        history = model.fit(
            x[:320], y[:320], epochs=2, shuffle=False, verbose=0,
            validation_data=(x[320:600], y[320:600]), validation_batch_size=28,
        )  # fmt: skip
        histories.append(history.history)
        if replicas:
            # Two epochs of two programs each; the first program that may have a loop has one step.
            assert len(started) <= 2 * (3 + 3)
    same(*histories)


def test_validation_goes_on_in_endless_data_where_the_last_one_ended():
    x, y = digits()
    found = []
    for replicas in 2, 0:
        model, source = compiled(replicas=replicas), Batches()
        history = model.fit(
            x[:64], y[:64], epochs=3, shuffle=False, verbose=0,
            validation_data=iter(source), validation_steps=7,
        )  # fmt: skip
        found.append((history.history, source.taken))
    same(*found)


def test_an_evaluation_within_an_evaluation():
    x, y = (a[: 11 * 32] for a in digits())

    class Evaluates(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            if not self.nested:
                self.nested.append(None)
                self.nested.append(self.model.evaluate(x, y, verbose=0, callbacks=[self]))

    found = []
    for model in compiled(), compiled(replicas=0):
        callback = Evaluates()
        callback.nested = []
        found.append((model.evaluate(x, y, verbose=0, callbacks=[callback]), callback.nested[1]))
    same(*found)


def test_steps_per_execution_groups_as_keras_does(started):
    x, y = (a[: 11 * 32] for a in digits())
    found = []
    for replicas in 2, 0:
        model = compiled(replicas=replicas, steps_per_execution=4)
        found.append((model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)))
        if replicas:
            assert len(started) < 11
    same(*found)
