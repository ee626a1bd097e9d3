"""What people see of `fit` on parameter servers: the logs of epochs, and TensorBoard."""

import keras
import numpy as np
import pytest

import unisono
from tests.ps_cluster import local_strategy

PARTS = {"data_ms", "pull_ms", "compute_ms", "push_ms"}
ADDED = {"steps_per_second", "staleness", "staleness_max", "pulled_mb", "pushed_mb", *PARTS}


def data(rows=64):
    return np.ones((rows, 4), "float32"), np.ones((rows, 2), "float32")


def compiled(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse", metrics=["mae"])
    return model


@pytest.fixture(scope="module")
def strategy():
    with local_strategy(workers=2, servers=2, max_staleness=1) as made:
        yield made


def test_the_logs_of_an_epoch_have_speed_staleness_and_bytes(strategy, tmp_path, capsys):
    model = compiled(strategy)
    seen = []

    class Nested(keras.callbacks.Callback):
        """Steps that are no training steps of this call."""

        def on_epoch_begin(self, epoch, logs=None):
            self.model.evaluate(*data(), verbose=0)
            self.model.train_on_batch(*data(8))

        def on_epoch_end(self, epoch, logs=None):
            seen.append((dict(logs), dict(strategy._numbers_of_workers)))

    board = unisono.callbacks.TensorBoard(tmp_path / "board")
    history = model.fit(
        *data(), batch_size=8, epochs=2, verbose=2, validation_data=data(16), callbacks=[Nested(), board]
    ).history
    # Of metrics alone: programs plot it, and compare it with that of another run.
    assert set(history) == {"loss", "mae", "val_loss", "val_mae"}
    assert all(set(logs) == set(history) | ADDED for logs, _ in seen)
    assert "staleness" in capsys.readouterr().out
    messages = {name: count for name, count in seen[-1][1].items() if name.endswith("/steps")}
    assert sum(messages.values()) == 8
    for logs, _ in seen:
        assert logs["staleness_max"] <= 1
        assert 0 <= logs["staleness"] <= 1
        assert logs["steps_per_second"] > 0
        assert all(logs[name] > 0 for name in PARTS)
        # Gradients of 10 weights, and additions to the sums and counts of two metrics.
        assert logs["pushed_mb"] == pytest.approx(8 * 4 * (10 + 4) / 1e6)
        assert 0 < logs["pulled_mb"] <= logs["pushed_mb"] * 2
    files = b"".join(path.read_bytes() for path in (tmp_path / "board").rglob("events*"))
    for tag in (b"epoch_staleness", b"epoch_pushed_mb", *(name.encode() for name in seen[-1][1])):
        assert tag in files
    # Behind the call there is nothing.
    assert strategy._numbers_of_workers == {}
    assert strategy._form.calls.tally is None


def test_an_infinite_loss_is_logged_as_such(strategy):
    x, y = data()
    history = compiled(strategy).fit(x, 1e30 * y, batch_size=8, epochs=2, verbose=0).history
    assert history["loss"] == [np.inf, np.inf]
    assert np.isfinite(history["mae"]).all()


def test_a_timer_of_this_process_says_where_the_speed_is(strategy):
    with pytest.raises(unisono.UnsupportedError, match="have `steps_per_second`"):
        compiled(strategy).fit(*data(), verbose=0, callbacks=[unisono.callbacks.StepTimer()])


def test_what_a_user_logs_stays(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse", metrics=[keras.metrics.MeanSquaredError("staleness")])
    history = model.fit(*data(), batch_size=8, verbose=0).history
    assert history["staleness"] == pytest.approx(history["loss"])


def test_with_staleness_0_no_update_is_missed_and_a_list_of_the_user_is_left_alone():
    with local_strategy(workers=2, max_staleness=0) as strategy:
        model = compiled(strategy)
        seen = []
        note = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.append(logs["staleness_max"])
        )
        model.fit(*data(), batch_size=8, epochs=2, verbose=0, callbacks=[note])
        assert seen == [0, 0]
        own = keras.callbacks.CallbackList([], add_history=True, model=model)
        assert set(model.fit(*data(), verbose=0, callbacks=own).history) == {"loss", "mae"}
