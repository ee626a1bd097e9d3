"""What `fit` takes from its data ahead of time, and how many steps run together."""

import keras
import numpy as np
import pytest

from unisono.training.trainer import _lookahead, _multi_step
from unisono.training.trainer._lookahead import StepLookahead, can_run_ahead
from unisono.training.trainer._multi_step import AdaptiveGroupSize, slots_for


class Token:
    """What a program returns; it is done when somebody waits for it, `seconds` later."""

    def __init__(self, clock, seconds):
        self._clock, self._seconds = clock, seconds

    def block_until_ready(self):
        self._clock[0] += self._seconds


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    for module in (_lookahead, _multi_step):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return now


def run(pace, clock, seconds_of_step, programs, **options):
    sizes = []
    for _ in range(programs):
        sizes.append(pace.size)
        pace.wait_for_capacity(Token(clock, seconds_of_step * pace.size), pace.size, **options)
    return sizes


def test_quick_steps_run_together_and_slow_ones_alone(clock):
    assert (
        run(AdaptiveGroupSize(), clock, 0.001, 20)[-1] == 16
    )  # 32 would take 32 ms, and 16 take 15 at least
    assert run(AdaptiveGroupSize(), clock, 0.0001, 30)[-1] == 32
    assert run(AdaptiveGroupSize(), clock, 0.5, 20) == [1] * 20


def test_steps_that_become_slow(clock):
    pace = AdaptiveGroupSize()
    run(pace, clock, 0.0001, 30)
    assert run(pace, clock, 0.1, 40)[-1] == 1


def test_slow_data_count(clock):
    assert run(AdaptiveGroupSize(), clock, 0.0, 20, collecting=0.1) == [1] * 20


def test_all_processes_take_the_smallest_wish(clock):
    pace = AdaptiveGroupSize()
    assert run(pace, clock, 0.0001, 30, agreed=np.int32(2))[-1] == 2
    assert pace.wish == 4  # what it has seen no slow program of


def test_slots_depend_on_shapes_alone():
    batch = {"x": np.zeros((8, 4), "f4"), "y": np.zeros(8, "i4")}
    assert slots_for(batch) == slots_for({k: v + 1 for k, v in batch.items()}) == 32
    assert slots_for(np.zeros((512, 1024), "f4")) == 4
    assert slots_for(np.zeros((4096, 4096), "f4")) == 1
    assert slots_for(None) == slots_for(np.array(["a"])) == slots_for([1.0]) == 1


def test_batches_are_taken_up_to_the_end_of_the_epoch():
    ahead, data = StepLookahead(), iter(range(100))
    ahead.begin_epoch(4)
    assert ahead.next_logs() is None
    assert ahead.take_first(data) == 0
    assert list(ahead.take_more(data, 31, lambda b: True, waits=False)) == [1, 2, 3]
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
    for name, value in (("run_eagerly", True), ("jit_compile", False), ("steps_per_execution", 2)):
        model = Model()
        setattr(model, name, value)
        assert not can_run_ahead(model, None)
