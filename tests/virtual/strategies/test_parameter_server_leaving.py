"""`fit` and the like left by exceptions and by Ctrl-C, also while a parameter server is gone."""

import os
import signal
import sys
import threading
import time

import keras
import numpy as np
import pytest

import unisono
from tests.ps_cluster import local_strategy
from tests.support import LIMIT
from unisono.coordinator import ClusterCoordinator
from unisono.parameter_server.server import _client
from unisono.rpc._calls import PeerLostError
from unisono.training.groups._multi_step import LazyArray


def compiled(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    return model


def batch(rows=8):
    return np.ones((rows, 4), "float32"), np.ones((rows, 2), "float32")


def interrupt_soon():
    """Send SIGINT to this process when the main thread waits."""
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()


def nothing_waits():
    """Return whether no thread waits for logs any more: Python would wait for it at its end."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        frames = [frame for top in sys._current_frames().values() for frame in stack(top)]
        if LazyArray.__array__.__code__ not in frames:
            return True
        time.sleep(0.02)
    return False


def stack(frame):
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def batches(event, at=3):
    """Rows for ever; something happens before one of the first batches."""
    for number in range(1_000_000):
        if number == at:
            event()
        yield batch()


class Reads(keras.callbacks.Callback):
    """Reads logs in the main thread, within Keras' function that discards every exception."""

    def on_train_batch_end(self, batch, logs=None):
        float(logs["loss"])


@pytest.mark.parametrize("callbacks", [[], [Reads()]])
def test_after_an_interrupt_the_model_trains_on(callbacks):
    with local_strategy(workers=2, servers=2) as strategy:
        model = compiled(strategy)
        with pytest.raises(KeyboardInterrupt):
            model.fit(batches(interrupt_soon), shuffle=False, verbose=0, callbacks=callbacks)
        assert nothing_waits()
        before = int(model.optimizer.iterations.numpy())
        model.fit(*batch(32), batch_size=8, verbose=0)
        assert int(model.optimizer.iterations.numpy()) == before + 4
        assert strategy._job.pool.queue.done()


@pytest.mark.parametrize("callbacks", [[], [Reads()]])
def test_an_interrupt_while_a_server_is_gone_wakes_everything(callbacks, monkeypatch):
    monkeypatch.setattr(_client, "_END_WITHIN", 0.1)
    with local_strategy(workers=2, servers=2) as strategy:
        model = compiled(strategy)
        model.fit(*batch(), verbose=0)

        def lose_a_server():
            strategy.cluster.rpc_servers[strategy.cluster.server_tasks[0]].close()
            interrupt_soon()

        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            model.fit(batches(lose_a_server), shuffle=False, verbose=0, callbacks=callbacks)
        assert nothing_waits()
        # It would be 300 s.
        assert time.monotonic() - began < 60


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_other_methods_are_left_too(method):
    with local_strategy(workers=1, servers=1) as strategy:
        model = compiled(strategy)
        data = batches(interrupt_soon)
        with pytest.raises(KeyboardInterrupt):
            getattr(model, method)(data if method == "evaluate" else ((x,) for x, _ in data), verbose=0)
        assert nothing_waits()
        assert model.predict(batch()[0], verbose=0).shape == (8, 2)


def test_after_an_exception_all_steps_before_it_count():
    class Fails(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 5:
                raise ZeroDivisionError("in a callback")

    with local_strategy(workers=2, servers=2) as strategy:
        model = compiled(strategy)
        with pytest.raises(ZeroDivisionError, match="in a callback"):
            model.fit(batches(lambda: None), shuffle=False, verbose=0, callbacks=[Fails()])
        assert int(model.optimizer.iterations.numpy()) == 5
        with pytest.raises(SystemExit):
            model.fit(batches(lambda: exit(3)), shuffle=False, verbose=0)
        model.fit(*batch(), verbose=0)


def test_an_interrupted_join_cancels_what_waits():
    @unisono.function
    def slow(x):
        return keras.ops.sum(keras.ops.matmul(x, x))

    with local_strategy(workers=1) as strategy:
        coordinator = ClusterCoordinator(strategy)
        value = coordinator.schedule(slow, args=(np.ones((4, 4), "float32"),))
        assert float(value.fetch()) == 64.0
        (task,) = strategy.cluster.worker_tasks
        strategy.cluster.kill_worker(task)
        values = [coordinator.schedule(slow, args=(np.ones((4, 4), "float32"),)) for _ in range(5)]
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            coordinator.join()
        with pytest.raises(unisono.CancelledError):
            values[-1].fetch()
        strategy.cluster.start_worker(task)
        coordinator.join()
        assert float(coordinator.schedule(slow, args=(np.ones((4, 4), "float32"),)).fetch()) == 64.0


def test_requests_fail_when_their_client_is_closed(monkeypatch):
    monkeypatch.setattr(_client, "_END_WITHIN", 0.1)
    with local_strategy(workers=1) as strategy:
        client = _client.ServerClient(strategy.cluster.peers_of_servers(strategy.cluster.chief))
        strategy.cluster.rpc_servers[strategy.cluster.server_tasks[0]].close()
        waiting = client.send(0, _client.Op.STATUS)
        client.close()
        with pytest.raises(PeerLostError):
            waiting.result(timeout=30)
