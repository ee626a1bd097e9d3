"""Steps that run ahead of Keras' loop: the same numbers, logs, errors and batches as one by one."""

import contextlib

import keras
import numpy as np
import pytest

from tests.virtual.training._digits import crossentropy, digits, mirrored, mlp
from unisono.callbacks import BackupAndRestore, TensorBoard
from unisono.callbacks._fit_backup import FitBackup
from unisono.training.groups import _batch_source, _group_size

pytestmark = pytest.mark.numbers


@pytest.fixture(params=[1, 5])
def together(request, monkeypatch):
    """How many steps run together, whatever the machine's speed."""
    monkeypatch.setattr(_group_size, "_FIRST", request.param)
    monkeypatch.setattr(_group_size, "_SECONDS", (-1.0, float("inf")))
    monkeypatch.setattr(_batch_source, "_PATIENCE", float("inf"))
    return request.param


def compiled(replicas=2, **changes):
    keras.utils.set_random_seed(5)
    with mirrored(replicas).scope():
        model = mlp()
        model.compile(**{"optimizer": "adam", "loss": crossentropy(), "metrics": ["accuracy"], **changes})
    return model


class Looks(keras.callbacks.Callback):
    """Sees single batches, so that nothing runs ahead of it."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append((batch, *logs.values()))


class Listens(Looks):
    """Promises to look at logs alone."""

    async_safe = True


@pytest.mark.parametrize("batch_size", [32, 25])
def test_numbers_do_not_depend_on_how_many_run_together(batch_size, monkeypatch):
    """To the last bit, for batches that divide, and for ones that are filled up; 8 and 3 are left over."""
    x, y = digits()
    rows = 11 * batch_size + 8
    found = []
    for first in (1, 3, 32):
        monkeypatch.setattr(_group_size, "_FIRST", first)
        model = compiled()
        history = model.fit(x[:rows], y[:rows], batch_size=batch_size, epochs=2, verbose=0)
        found.append((model.get_weights(), history.history))
    for weights, history in found[1:]:
        assert history == found[0][1]
        for a, b in zip(weights, found[0][0], strict=True):
            np.testing.assert_array_equal(a, b)


def test_logs_are_those_of_each_step(together):
    x, y = digits()
    seen = []
    for callback in (Looks(), Listens()):
        history = compiled().fit(x[:352], y[:352], batch_size=32, verbose=0, callbacks=[callback])
        # Keras tells who promises to be safe in threads, which overtake each other.
        seen.append((sorted(callback.logs), history.history))
    assert [log[0] for log in seen[0][0]] == [*range(11)]
    # Two programs: rounding differs.
    np.testing.assert_allclose(seen[1][0], seen[0][0], rtol=1e-5)
    for name, values in seen[0][1].items():
        np.testing.assert_allclose(seen[1][1][name], values, rtol=1e-5)


class Batches:
    """Endless batches, written into one buffer; counts how many were taken."""

    def __init__(self, rows=32, ends=None, raises=None):
        self.rows, self.ends, self.raises = rows, ends, raises
        self.taken = 0

    def __iter__(self):
        x, y = digits()
        buffers = np.empty((self.rows, *x.shape[1:]), x.dtype), np.empty((self.rows,), y.dtype)
        while True:
            if self.taken == self.raises:
                raise OSError("the disk is gone")
            if self.taken == self.ends:
                return
            start = self.taken * 7 % 500
            for buffer, array in zip(buffers, (x, y), strict=True):
                buffer[:] = array[start : start + self.rows]
            self.taken += 1
            yield buffers


def trained(batches, callbacks=(), **options):
    model = compiled()
    history = model.fit(iter(batches), shuffle=False, verbose=0, callbacks=list(callbacks), **options)
    return model.get_weights(), history.history


def test_no_batch_is_taken_beyond_an_epoch_or_lost_between_two(together):
    """11 steps are no multiple of 5."""
    ahead, looked_at = Batches(), Batches()
    weights, history = trained(ahead, steps_per_epoch=11, epochs=3)
    expected, expected_history = trained(looked_at, [Looks()], steps_per_epoch=11, epochs=3)
    assert ahead.taken == looked_at.taken
    for a, b in zip(weights, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(history["loss"], expected_history["loss"], rtol=1e-5)


# Keras says so of all data whose number of batches nobody knows.
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_data_without_a_known_end(together):
    ahead, looked_at = Batches(ends=13), Batches(ends=13)
    weights, _ = trained(ahead)
    expected, _ = trained(looked_at, [Looks()])
    assert ahead.taken == 13
    for a, b in zip(weights, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_an_error_in_the_data_comes_after_the_steps_before_it(together):
    model = compiled()
    with pytest.raises(OSError, match="the disk is gone"):
        model.fit(iter(Batches(raises=13)), shuffle=False, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 13
    # And the model can be trained on.
    model.fit(iter(Batches(ends=3)), shuffle=False, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 16


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_batches_of_other_shapes_break_a_group(together):
    x, y = digits()
    sizes = [32, 32, 16, 32, 31, 31, 32]
    starts = np.cumsum([0, *sizes[:-1]])
    batches = [(x[a : a + n], y[a : a + n]) for a, n in zip(starts, sizes, strict=True)]
    ahead, looked_at = compiled(), compiled()
    ahead.fit((b for b in batches), shuffle=False, verbose=0)
    looked_at.fit((b for b in batches), shuffle=False, verbose=0, callbacks=[Looks()])
    assert int(ahead.optimizer.iterations.numpy()) == 7
    for a, b in zip(ahead.get_weights(), looked_at.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_steps_per_execution_stages_each_batch_before_the_next_is_made():
    """The source writes all batches into one buffer; 13 are no multiple of 4."""
    together, alone = compiled(steps_per_execution=4), compiled()
    source = Batches(ends=13)
    together.fit(iter(source), shuffle=False, verbose=0)
    alone.fit(iter(Batches(ends=13)), shuffle=False, verbose=0, callbacks=[Looks()])
    assert source.taken == 13
    assert runs_together(together)
    for a, b in zip(together.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_with_steps_per_execution_an_error_comes_after_the_steps_before_it_too():
    model = compiled(steps_per_execution=4)
    with pytest.raises(OSError, match="the disk is gone"):
        model.fit(iter(Batches(raises=6)), shuffle=False, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 6


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("callbacks", [[], [Looks()]])
def test_steps_that_are_no_multiple_of_steps_per_execution_are_rounded_up_as_in_keras(callbacks):
    """Keras asks for whole calls: 7 steps with 3 in a call are 9; 20 batches end in the third epoch."""
    x, y = digits()
    pairs = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 80, 4)]
    done = []
    for scope in (contextlib.nullcontext(), mirrored(2).scope()):
        keras.utils.set_random_seed(5)
        with scope:
            model = mlp()
            model.compile("adam", crossentropy(), steps_per_execution=3)
        model.fit(
            (pair for pair in pairs),
            steps_per_epoch=7,
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
        trained = int(model.optimizer.iterations)
        loss = model.evaluate((pair for pair in pairs), steps=7, verbose=0)
        predicted = model.predict(((x,) for x, _ in pairs), steps=7, verbose=0)
        done.append((trained, len(predicted), loss))
    assert done[1][:2] == done[0][:2] == (20, 36)
    assert done[1][2] == pytest.approx(done[0][2], rel=1e-5)


def runs_together(model):
    return any(key.slots > 1 for key in model.train_function._programs)


def test_who_needs_the_state_of_batches_gets_them_one_by_one(tmp_path):
    x, y = digits()
    patient = [keras.callbacks.EarlyStopping("loss"), keras.callbacks.ModelCheckpoint(tmp_path / "m.keras")]
    for callbacks, runs_ahead in (
        ([], True),
        (patient, True),
        ([TensorBoard(tmp_path / "epochs")], True),
        ([TensorBoard(tmp_path / "batches", update_freq=2)], False),
        ([Listens()], True),
        ([Looks()], True),
        ([BackupAndRestore(tmp_path / "epoch")], True),
        ([BackupAndRestore(tmp_path / "seventh", 7)], True),
        ([BackupAndRestore(tmp_path / "each", 1)], False),
        ([keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: None)], True),
        ([keras.callbacks.ModelCheckpoint(tmp_path / "{batch}.keras", save_freq=2)], False),
    ):
        model = compiled(1)
        model.fit(x[:64], y[:64], verbose=0, callbacks=callbacks)
        assert runs_together(model) is runs_ahead
        assert model.train_function.lookahead is None


def test_backups_come_after_the_steps_that_they_were_asked_for(together, monkeypatch, tmp_path):
    saved, save = [], FitBackup._save

    def noted(self, progress, values, *local):
        saved.append((progress.epoch, progress.batch))
        save(self, progress, values, *local)

    monkeypatch.setattr(FitBackup, "_save", noted)
    x, y = digits()
    model = compiled()
    backup = BackupAndRestore(tmp_path, 7, asynchronous=False)
    model.fit(x[: 32 * 12], y[: 32 * 12], verbose=0, epochs=2, callbacks=[backup])
    assert saved == [(0, 7), (1, 2), (1, 9)]


def test_keras_starts_no_thread_for_ends_of_batches_of_which_nobody_hears(monkeypatch, tmp_path):
    dispatched = []
    original = keras.callbacks.CallbackList._async_dispatch

    def dispatch(self, *args):
        dispatched.append(args)
        original(self, *args)

    monkeypatch.setattr(keras.callbacks.CallbackList, "_async_dispatch", dispatch)
    x, y = digits()
    model = compiled(1)
    counts = []
    for options in (
        {"verbose": 0},
        {"verbose": 0, "callbacks": [keras.callbacks.CSVLogger(tmp_path / "log.csv")]},
        {"verbose": 0, "callbacks": [Listens()]},
        {"verbose": 1},
    ):
        history = model.fit(x[:96], y[:96], **options).history
        assert set(history) == {"accuracy", "loss"}
        counts.append(len(dispatched))
        dispatched.clear()
    assert counts == [0, 0, 3, 3]


def test_an_interrupt_leaves_whole_weights(together):
    class Interrupts(keras.callbacks.Callback):
        sees_batches = False

        def on_train_batch_begin(self, batch, logs=None):
            if batch == 7:
                raise KeyboardInterrupt

    x, y = digits()
    model = compiled()
    with contextlib.suppress(KeyboardInterrupt):
        model.fit(x[:352], y[:352], batch_size=32, verbose=0, callbacks=[Interrupts()])
    done = int(model.optimizer.iterations.numpy())
    assert 7 <= done <= 7 + together
    assert all(np.isfinite(w).all() for w in model.get_weights())
    model.fit(x[:32], y[:32], verbose=0)
    assert int(model.optimizer.iterations.numpy()) == done + 1


def test_the_step_is_traced_once():
    calls = []

    class Counts(keras.layers.Layer):
        def call(self, x):
            calls.append(x)
            return x

    x, y = digits()
    with mirrored(2).scope():
        model = mlp(Counts())
        model.compile("adam", crossentropy())
    model.build((None, 64))
    model._symbolic_build(data_batch=(x[:32], y[:32]))
    calls.clear()
    model.fit(x[:64], y[:64], batch_size=32, verbose=0)
    # The forward pass is read for two numbers of rows, and the step is traced once.
    assert [x.shape[0] for x in calls] == [16, 32, 16]


def test_a_progress_bar_does_not_go_back():
    """Keras reads logs in several threads: those of one program's steps may reach the bar in any order."""
    bar = keras.callbacks.ProgbarLogger()
    with mirrored(2).scope():
        bar.set_params({"verbose": 1, "epochs": 2, "steps": 6})
        for epoch in range(2):
            bar.on_epoch_begin(epoch)
            seen = []
            for batch in (0, 3, 1, 4, 2):
                bar.on_train_batch_end(batch, {"loss": float(batch)})
                seen.append((bar.seen, bar.progbar._values["loss"][0]))
            assert seen == [(1, 0), (4, 3), (4, 3), (5, 4), (5, 4)]


def test_a_progress_bar_counts_the_time_of_all_steps_of_the_first_program(together):
    """Steps whose logs are there at once did not take no time."""
    x, y = digits()
    epochs = []

    class Watch(keras.callbacks.ProgbarLogger):
        async_safe = True

        def on_epoch_begin(self, epoch, logs=None):
            super().on_epoch_begin(epoch, logs)
            epochs.append([])

        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            # Keras divides the time since the first step by the others, where it has seen that one.
            epochs[-1].append((self.seen, self.progbar is not None and self.progbar._time_after_first_step))

    with mirrored(2).scope():
        model = mlp()
        model.compile("sgd", crossentropy())
        model.fit(x[:128], y[:128], batch_size=8, epochs=3, shuffle=False, callbacks=[Watch()])
    for epoch in epochs:
        counts = [seen for seen, _ in epoch]
        assert counts == sorted(counts)
        assert together == 1 or not any(first for _, first in epoch)
    assert len(epochs) == 3
