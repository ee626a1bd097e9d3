"""A strategy may give `fit` a function of its own: what it must do, and what it may leave out."""

import keras
import numpy as np
import pytest

import unisono
from unisono.callbacks import BackupAndRestore, StepTimer
from unisono.training.groups._step_profile import HostTimer
from unisono.training.trainer._protocol import set_lookahead, timer_of
from unisono.training.trainer._trainer_step import TrainerTask


class EagerFunction:
    """Keras' own step, op by op and one at a time; knows no devices."""

    def __init__(self, model, task):
        self._model, self._task = model, task
        self.calls = 0

    def __call__(self, state, iterator):
        batch = next(iterator)
        self.calls += 1
        if self._task is TrainerTask.TRAIN:
            return self._model.train_step(state, batch)
        if self._task is TrainerTask.TEST:
            return self._model.test_step(state, batch)
        outputs, non_trainable = self._model.predict_step(state, batch)
        return outputs, (state[0], non_trainable)


class TimedEagerFunction(EagerFunction):
    def __init__(self, model, task):
        super().__init__(model, task)
        self.timer = HostTimer()

    def __call__(self, state, iterator):
        batch = next(iterator)
        self.timer.add(batch, seconds=0.0)
        return super().__call__(state, iter([batch]))


class EagerStrategy(unisono.Strategy):
    """Runs steps in its own way, on no mesh."""

    made = EagerFunction
    num_replicas_in_sync = 1
    worker_devices = ()

    def make_trainer_function(self, model, task):
        return self.made(model, task)


class TimedEagerStrategy(EagerStrategy):
    made = TimedEagerFunction


def data():
    x = np.linspace(-1, 1, 40, dtype="f4").reshape(20, 2)
    return x, x.sum(-1, keepdims=True)


def build():
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


def held(strategy):
    with strategy.scope():
        return build()


def results(model, callbacks=()):
    """What training, validation and the three methods give; 20 rows are three batches of 8, 8 and 4."""
    x, y = data()
    options = {"batch_size": 8, "verbose": 0}
    history = model.fit(
        x, y, epochs=2, shuffle=False, validation_data=(x, y), callbacks=list(callbacks), **options
    ).history
    return history, model.evaluate(x, y, **options), model.predict(x, **options), model.get_weights()


def assert_close(found, expected):
    assert found.keys() == expected.keys() if isinstance(expected, dict) else len(found) == len(expected)
    pairs = [(found[k], expected[k]) for k in expected] if isinstance(expected, dict) else [(found, expected)]
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_fit_runs_the_function_that_the_strategy_makes():
    model = held(EagerStrategy())
    found, expected = results(model), results(build())
    assert type(model.train_function) is EagerFunction
    assert (model.train_function.calls, model.test_function.calls, model.predict_function.calls) == (6, 9, 3)
    for a, b in zip(found[:3], expected[:3], strict=True):
        assert_close(a, b)
    for a, b in zip(found[3], expected[3], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_what_raises_in_it_leaves_the_weights_of_the_last_step():
    class Broken(EagerFunction):
        def __call__(self, state, iterator):
            if self.calls == 2:
                raise OSError("the server is gone")
            return super().__call__(state, iterator)

    strategy = EagerStrategy()
    strategy.made = Broken
    model = held(strategy)
    with pytest.raises(OSError, match="the server is gone"):
        model.fit(*data(), batch_size=4, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 2
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_a_backup_resumes_without_a_lookahead(tmp_path):
    x, y = data()

    left = [99]

    class Stop(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

    def run(callbacks):
        model = held(EagerStrategy())
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        return model.get_weights()

    expected = run([])
    left[0] = 7
    with pytest.raises(KeyboardInterrupt):
        run([BackupAndRestore(tmp_path, 3, asynchronous=False), Stop()])
    left[0] = 4  # of ten steps six were saved
    for a, b in zip(run([BackupAndRestore(tmp_path, 3, asynchronous=False), Stop()]), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_step_timer_reads_the_timer_of_the_function_where_it_has_one():
    x, y = data()
    model = held(TimedEagerStrategy())
    history = model.fit(x, y, batch_size=8, verbose=0, callbacks=[StepTimer()]).history
    assert {"data_ms", "step_ms", "examples_per_s"} <= history.keys()
    assert model.train_function.timer.read().batches == 3
    with pytest.raises(unisono.UnsupportedError, match="StepTimer measures steps that this process runs"):
        held(EagerStrategy()).fit(x, y, verbose=0, callbacks=[StepTimer()])


def test_a_strategy_without_a_mesh_says_what_it_cannot_do():
    strategy = EagerStrategy()
    calls = {
        "run": lambda: strategy.run(abs, args=(1,)),
        "reduce": lambda: strategy.reduce("sum", 1.0, axis=None),
        "gather": lambda: strategy.gather(np.ones(2), axis=0),
        "local_results": lambda: strategy.local_results(1.0),
        "distribute_dataset": lambda: strategy.distribute_dataset([np.ones(2)]),
        "distribute_datasets_from_function": lambda: strategy.distribute_datasets_from_function(list),
        "distribute_values_from_function": lambda: strategy.distribute_values_from_function(print),
        "extended.broadcast_to": lambda: strategy.extended.broadcast_to(np.ones(2)),
    }
    for name, call in calls.items():
        with pytest.raises(unisono.UnsupportedError, match=rf"`strategy\.{name}`.*EagerStrategy"):
            call()
    with strategy.scope():
        model = build()
    distributed = unisono.OneDeviceStrategy("cpu:0").distribute_dataset([data()])
    with pytest.raises(unisono.MixedStrategyError, match="must be made by the strategy of the model"):
        model.fit(distributed, verbose=0)


def test_a_function_in_the_scope_of_a_strategy_without_a_mesh():
    with EagerStrategy().scope():
        doubled = unisono.function(lambda x: 2 * x)(np.arange(3.0))
    np.testing.assert_array_equal(doubled, [0, 2, 4])


def test_a_dataset_trains_on_a_strategy_without_a_mesh():
    x, y = data()
    batches = unisono.data.Dataset.from_tensor_slices((x, y)).batch(8)
    found = held(EagerStrategy()).fit(batches, verbose=0).history
    expected = build().fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    assert_close(found, expected)


def test_any_callable_can_be_a_function_of_a_model():
    set_lookahead(print, None)
    assert not hasattr(print, "lookahead")
    assert timer_of(print) is None
