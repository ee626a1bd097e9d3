"""`StepTimer`: three more numbers in an epoch's logs, and nothing else changes."""

import csv
import re

import jax
import keras
import numpy as np
import pytest
from tests.support import count_host_reads

import unisono
from unisono.callbacks import BackupAndRestore, StepTimer
from unisono.callbacks import _timer as timer
from unisono.training.groups import _group_size, _step_loop, _step_sample
from unisono.training.groups._step_sample import StepParts
from unisono.training.trainer import _trainer_function

TIMES = {"data_ms", "host_ms", "compute_ms", "exchange_ms", "step_ms", "examples_per_s"}
ADDED = TIMES | {"tflop_per_s"}
SAMPLED = {"host_ms", "compute_ms", "exchange_ms"}


def data(rows=12):
    x = np.linspace(0, 1, rows * 4, dtype="f4").reshape(rows, 4)
    return x, x.sum(-1, keepdims=True)


def build(replicas=2, **compile_with):
    keras.utils.set_random_seed(3)
    with unisono.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile(**{"optimizer": "adam", "loss": "mse", "metrics": ["mae"], **compile_with})
    return model


def fit(model, *callbacks, rows=12, **kwargs):
    kwargs = {"batch_size": 4, "verbose": 0, "shuffle": False, "epochs": 2, **kwargs}
    return model.fit(*data(rows), callbacks=list(callbacks), **kwargs).history


class Watch:
    """A clock that the source of the data turns, so that nothing depends on the machine."""

    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def watch(monkeypatch):
    watch = Watch()
    monkeypatch.setattr(timer, "perf_counter", watch)
    monkeypatch.setattr(_step_loop, "perf_counter", watch)
    monkeypatch.setattr(_trainer_function, "perf_counter", watch)
    monkeypatch.setattr(_step_sample, "perf_counter", watch)
    return watch


class Turns(keras.callbacks.Callback):
    """Lets time pass at the end of each epoch, as devices do that have to finish."""

    async_safe = True

    def __init__(self, watch, batch=0.0, test=0.0):
        super().__init__()
        self.watch, self.seconds, self.test = watch, batch, test

    def on_train_batch_begin(self, batch, logs=None):
        self.watch.now += self.seconds

    def on_test_batch_begin(self, batch, logs=None):
        self.watch.now += self.test


def slow_source(watch, seconds, batches, rows=4):
    x, y = data(rows)
    while True:
        for i in range(batches):
            if i == batches - 1:  # Keras looks at the first ones before the epoch begins.
                watch.now += seconds
            yield x, y


def test_the_logs_say_what_the_watch_said(watch):
    history = build().fit(
        slow_source(watch, 2.0, 5),
        steps_per_epoch=5,
        shuffle=False,
        verbose=0,
        callbacks=[StepTimer(), Turns(watch, batch=0.25)],
    )
    found = {k: history.history[k] for k in sorted(TIMES - SAMPLED)}
    # One wait of 2 s, and 5 batches of 0.25 s; of 20 rows.
    assert found == {"data_ms": [400.0], "step_ms": [650.0], "examples_per_s": [pytest.approx(20 / 3.25)]}


@pytest.mark.parametrize("validates", [False, True])
def test_validation_does_not_count(watch, validates):
    more = {"validation_data": data(8)} if validates else {}
    history = fit(build(), StepTimer(), Turns(watch, batch=0.5, test=7.0), **more)
    assert history["step_ms"] == [500.0, 500.0]
    assert history["examples_per_s"] == [8.0, 8.0]
    assert ("val_loss" in history) == validates


def test_batches_executed_together_count_each(watch):
    history = fit(build(steps_per_execution=2), StepTimer(), Turns(watch, batch=3.0), rows=24)
    assert history["step_ms"] == [1500.0, 1500.0]


def test_other_logs_stay_as_they_are():
    with_timer = fit(build(), StepTimer(), validation_data=data(4))
    without = fit(build(), validation_data=data(4))
    assert set(with_timer) == set(without) | ADDED
    assert {k: with_timer[k] for k in without} == without


def test_keras_callbacks_get_the_numbers(tmp_path):
    history = fit(build(), StepTimer(), keras.callbacks.CSVLogger(tmp_path / "log.csv"))
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(r["step_ms"]) for r in rows] == history["step_ms"]


@pytest.mark.parametrize("verbose", [1, 2])
def test_the_progress_bar_shows_them_at_the_end(capsys, verbose):
    fit(build(), StepTimer(), epochs=1, verbose=verbose)
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).replace("\b", "")
    last = text.split("\r")[-1].splitlines()[-1]
    for name in ADDED:
        assert re.search(rf" - {name}: (\d|nan)", last), text


class HostReads(keras.callbacks.Callback):
    """Counts what makes the host wait within an epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.counting = count_host_reads()
        self.reads = self.counting.__enter__()

    def on_epoch_end(self, epoch, logs=None):
        self.counting.__exit__(None, None, None)


@pytest.mark.parametrize("rows", [16, 64])
def test_nothing_is_read_for_the_timer(rows):
    """Only the two results, when the epoch is over: as many as without it, however many steps there are."""
    counter = HostReads()
    fit(build(), StepTimer(), counter, rows=rows)
    # Waiting for a program that has two more behind it holds no device up.
    assert [name for name in counter.reads if name != "block_until_ready"] == ["array", "array"]


def test_keras_reads_logs_in_its_own_thread():
    """No hook of a batch, which would make Keras read the logs of every step where it is."""
    callbacks = keras.callbacks.CallbackList([StepTimer()])
    assert callbacks._async_train
    assert callbacks._async_test


def test_a_run_that_goes_on_is_timed_too(tmp_path, watch):
    runs = []

    class Fails(Turns):
        async_safe = False

        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and len(runs) == 1:
                raise RuntimeError("stop")

    runs.append("fails")
    with pytest.raises(RuntimeError, match="stop"):
        fit(build(), BackupAndRestore(tmp_path, save_freq=1), StepTimer(), Fails(watch, batch=0.5))
    watch.now = 7.0  # another process' clock begins anywhere
    runs.append("goes on")
    history = fit(build(), BackupAndRestore(tmp_path, save_freq=1), StepTimer(), Fails(watch, batch=0.5))
    assert history["step_ms"][-1] == 500.0
    assert all(0 <= ms <= 1500 for ms in history["step_ms"])


def test_an_epoch_without_batches_has_no_speed():
    assert timer.split_of(timer.HostTimes(), 3.0, StepParts(0, 0, 0, 1)) == dict.fromkeys(TIMES, 0.0)


def test_a_model_of_no_strategy_is_refused():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"with strategy.scope\(\)"):
        fit(model, StepTimer())


class Waits(keras.callbacks.Callback):
    """Counts the calls that wait for devices, in each epoch."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.counting = count_host_reads()
        self.reads = self.counting.__enter__()

    def on_epoch_end(self, epoch, logs=None):
        self.counting.__exit__(None, None, None)
        self.epochs.append(self.reads.count("block_until_ready"))


def test_one_program_in_ten_seconds_is_waited_for(monkeypatch):
    """The first epoch has the sample; the ones after it wait as often as without the callback."""
    # Otherwise it depends on the machine how many steps are in a program.
    monkeypatch.setattr(_group_size, "_SECONDS", (-1.0, float("inf")))
    monkeypatch.setattr(_group_size, "_SECONDS_SHORT", (-1.0, float("inf")))
    waits = []
    for callbacks in ([], [StepTimer()]):
        counter = Waits()
        fit(build(steps_per_execution=4), *callbacks, counter, rows=64, epochs=3)
        waits.append(counter.epochs)
    without, sampled = waits
    assert sampled[1:] == without[1:]
    assert without[0] < sampled[0] <= without[0] + 2


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_parts_of_a_sampled_step(replicas):
    model = build(replicas)
    history = fit(model, StepTimer(), epochs=2, rows=64)
    assert all(history[name][-1] > 0 for name in ("host_ms", "compute_ms"))
    # One device has nobody to exchange with.
    assert (history["exchange_ms"][-1] > 0) == (replicas > 1)
    assert model.train_function.timer.sampler is None


def test_a_profile_of_the_user_goes_before(tmp_path):
    jax.profiler.start_trace(tmp_path)
    try:
        history = fit(build(), StepTimer(), rows=64)
    finally:
        jax.profiler.stop_trace()
    assert np.isnan(history["compute_ms"]).all()
    assert np.isfinite(history["step_ms"]).all()
