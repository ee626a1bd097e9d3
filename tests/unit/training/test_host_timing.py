"""The timer of a train function: whose time is whose."""

import numpy as np
import pytest

from unisono.training.groups._step_profile import HostTimer, HostTimes


def step(timer, batches, data=0.0, placing=0.0, starting=0.0):
    for batch in batches:
        timer.add(batch, data)
    timer.placing += placing
    timer.calls += data * len(batches) + placing + starting


def test_the_time_of_a_step_has_three_parts():
    timer = HostTimer()
    step(timer, [(np.zeros((4, 2)), None)], data=5, placing=2, starting=1)
    step(timer, [(np.zeros((3, 2)), None)], data=0.5, placing=0.25, starting=0.125)
    assert timer.read() == HostTimes(data=5.5, placing=2.25, starting=1.125, batches=2, rows=7)


def test_a_later_reading_since_an_earlier_one():
    timer = HostTimer()
    step(timer, [np.zeros(2)], data=1)
    before = timer.read()
    step(timer, [np.zeros(6)] * 3, data=2, starting=4)
    assert timer.read().since(before) == HostTimes(data=6, starting=4, batches=3, rows=18)


@pytest.mark.parametrize("batch", [(), None, (3.0,), np.zeros(()), ("text",)])
def test_what_is_no_batch_is_left_to_the_step(batch):
    timer = HostTimer()
    timer.add(batch, 0.0)
    assert (timer.read().batches, timer.read().rows) == (1, 0)
