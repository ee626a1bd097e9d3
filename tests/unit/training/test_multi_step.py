"""How many steps run in one program."""

import numpy as np
import pytest

from unisono.training.groups import _group_size
from unisono.training.groups._group_size import AdaptiveGroupSize
from unisono.training.groups._multi_step import slots_for


class Token:
    """What a program returns; it is done `seconds` after the wait for it begins."""

    def __init__(self, clock, seconds):
        self._clock, self._seconds = clock, seconds

    def end(self):
        self._seconds = 0

    def is_ready(self):
        return not self._seconds

    def block_until_ready(self):
        self._clock[0] += self._seconds


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(_group_size, "perf_counter", lambda: now[0])
    return now


def run(pace, clock, seconds_of_step, programs, **options):
    sizes = []
    for _ in range(programs):
        sizes.append(pace.size)
        pace.wait_for_capacity(Token(clock, seconds_of_step * pace.size), pace.size, **options)
    return sizes


def test_quick_steps_run_together_and_slow_ones_alone(clock):
    # 32 would take 2.2 s, and 16 take a second at least.
    assert run(AdaptiveGroupSize(), clock, 0.07, 20)[-1] == 16
    assert run(AdaptiveGroupSize(), clock, 0.18, 20)[-1] == 8
    assert run(AdaptiveGroupSize(), clock, 0.001, 30)[-1] == 32
    assert run(AdaptiveGroupSize(), clock, 1.5, 20) == [1] * 20


def test_on_other_devices_a_program_is_short(clock):
    assert run(AdaptiveGroupSize(platform="tpu"), clock, 0.005, 20)[-1] == 8
    assert run(AdaptiveGroupSize(platform="tpu"), clock, 0.05, 20) == [1] * 20


def test_steps_that_become_slow(clock):
    pace = AdaptiveGroupSize()
    run(pace, clock, 0.0001, 30)
    assert run(pace, clock, 3.0, 40)[-1] == 1


def test_time_between_epochs_does_not_count(clock):
    pace = AdaptiveGroupSize()
    assert run(pace, clock, 0.18, 20)[-1] == 8
    in_flight = [Token(clock, 8 * 0.18), Token(clock, 8 * 0.18)]
    for token in in_flight:
        pace.wait_for_capacity(token, 8)
    for token in in_flight:
        token.end()
    clock[0] += 60  # validation, or another call of `fit`
    for _ in range(2):
        pace.wait_for_capacity(Token(clock, 8 * 0.18), 8)
        assert pace.size == 8


def test_slow_data_count(clock):
    assert run(AdaptiveGroupSize(), clock, 0.0, 20, collecting=1.0) == [1] * 20


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


def test_the_number_that_the_user_asks_for_is_taken_for_arrays_of_numbers():
    assert slots_for(np.zeros((4096, 4096), "f4"), wanted=7) == 7
    assert slots_for(np.array(["a"]), wanted=7) == 1
    assert slots_for(np.zeros((2, 2)), wanted=1) == 1
