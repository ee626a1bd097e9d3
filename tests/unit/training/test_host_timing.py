"""The clock of a train function: whose time is whose, with a watch that the tests turn."""

import numpy as np
import pytest

from unisono.training.trainer import _host_timing
from unisono.training.trainer._host_timing import HostTimer, HostTimes


class Watch:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def watch(monkeypatch):
    watch = Watch()
    monkeypatch.setattr(_host_timing, "perf_counter", watch)
    return watch


def step(clock, watch, batches, data=0.0, placing=0.0, starting=0.0):
    def place(batch):
        watch.now += placing
        return batch

    timed = clock.time(place)
    clock.begin()
    watch.now += data
    clock.add(batches)
    for batch in batches:
        assert timed(batch) is batch
    watch.now += starting
    clock.end()


def test_the_time_of_a_step_has_three_parts(watch):
    clock = HostTimer()
    step(clock, watch, [(np.zeros((4, 2)), None)], data=5, placing=2, starting=1)
    watch.now += 1000  # between steps: the callbacks' time, and not the clock's
    step(clock, watch, [(np.zeros((3, 2)), None)], data=0.5, placing=0.25, starting=0.125)
    assert clock.read() == HostTimes(data=5.5, placing=2.25, starting=1.125, batches=2, rows=7)


def test_several_batches_at_once_count_each(watch):
    clock = HostTimer()
    step(clock, watch, [np.zeros((4, 2))] * 3, data=1, placing=1, starting=1)
    assert clock.read() == HostTimes(data=1, placing=3, starting=1, batches=3, rows=12)


def test_a_later_reading_since_an_earlier_one(watch):
    clock = HostTimer()
    step(clock, watch, [np.zeros(2)], data=1)
    before = clock.read()
    step(clock, watch, [np.zeros(6)], data=2, starting=4)
    assert clock.read().since(before) == HostTimes(data=2, starting=4, batches=1, rows=6)


def test_the_end_of_the_data_counts_nothing(watch):
    clock = HostTimer()
    clock.begin()
    watch.now += 9
    clock.begin()
    assert clock.read() == HostTimes()


@pytest.mark.parametrize("batch", [(), None, (3.0,), np.zeros(()), ("text",)])
def test_what_is_no_batch_is_left_to_the_step(batch):
    clock = HostTimer()
    clock.add([batch])
    assert (clock.read().batches, clock.read().rows) == (1, 0)
