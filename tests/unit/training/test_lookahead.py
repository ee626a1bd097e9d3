"""What `fit` takes from its data ahead of time."""

import keras
import numpy as np
import pytest

from unisono.training.groups import _batch_source
from unisono.training.groups._lookahead import StepLookahead
from unisono.training.trainer._run_ahead_of_loop import can_run_ahead


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(_batch_source, "perf_counter", lambda: now[0])
    return now


def test_batches_are_taken_up_to_the_end_of_the_epoch():
    ahead, data = StepLookahead(), iter(range(100))
    ahead.begin_epoch(4)
    assert ahead.next_logs() is None
    assert ahead.take_first(data) == 0
    assert list(ahead.take_more(data, ahead.room, lambda b: True, waits=False)) == [1, 2, 3]
    assert next(data) == 4


def test_a_batch_that_does_not_fit_is_next():
    ahead, data = StepLookahead(), iter(range(100))
    ahead.begin_epoch(None)
    assert ahead.take_first(data) == 0
    assert list(ahead.take_more(data, 31, lambda b: b < 3, waits=False)) == [1, 2]
    assert ahead.take_first(data) == 3
    assert ahead.take_first(data) == 4


def test_slow_data_are_not_waited_for_unless_others_do(clock):
    def slow():
        for i in range(100):
            clock[0] += 0.006
            yield i

    ahead, data = StepLookahead(), slow()
    ahead.begin_epoch(None)
    assert ahead.take_first(data) == 0
    assert list(ahead.take_more(data, 31, lambda b: True, waits=False)) == [1, 2]
    assert list(ahead.take_more(data, 5, lambda b: True, waits=True)) == [3, 4, 5, 6, 7]


def test_an_error_is_raised_where_its_batch_is_asked_for():
    def broken():
        yield from range(2)
        raise OSError("gone")

    ahead, data = StepLookahead(), broken()
    ahead.begin_epoch(None)
    assert ahead.take_first(data) == 0
    assert list(ahead.take_more(data, 31, lambda b: True, waits=False)) == [1]
    with pytest.raises(OSError, match="gone"):
        ahead.take_first(data)
    with pytest.raises(StopIteration):
        ahead.take_first(data)


def test_a_new_epoch_forgets_what_was_broken_off():
    ahead = StepLookahead()
    ahead.begin_epoch(9)
    first = ahead.queue_logs({"loss": np.arange(3.0)}, 3)
    assert float(first["loss"]) == 0.0
    assert float(ahead.next_logs()["loss"]) == 1.0
    ahead.begin_epoch(9)
    assert ahead.next_logs() is None


class Model:
    run_eagerly, jit_compile, steps_per_execution = False, True, 1


def test_who_looks():
    assert can_run_ahead(Model(), None)
    assert can_run_ahead(Model(), [keras.callbacks.History(), [keras.callbacks.EarlyStopping()]])
    assert not can_run_ahead(Model(), keras.callbacks.TerminateOnNaN())
    assert not can_run_ahead(Model(), keras.callbacks.CallbackList())
    for name, value in (("run_eagerly", True), ("jit_compile", False)):
        model = Model()
        setattr(model, name, value)
        assert not can_run_ahead(model, None)
