import pytest

from unisono.checkpoint.preemption._handler import StepTiming, wants_save


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("now", "noticed_at", "saved", "expected"),
    [
        (50, None, False, False),
        (50, 50, False, True),
        (50, 50, True, False),
        (75.9, 50, True, False),
        (76, 50, True, True),
        (90, 50, True, True),
    ],
)
def test_a_word_is_acted_upon_at_once_and_again_before_the_end(now, noticed_at, saved, expected):
    assert wants_save(now, noticed_at, saved=saved, grace=30, needed=4) is expected


def test_the_pace_forgets_the_step_that_compiled_and_leaves_saves_out_of_steps():
    clock = Clock()
    pace = StepTiming(clock)
    assert pace.needed() == 0
    clock.now += 60
    for _ in range(11):
        pace.step_ended()
        clock.now += 2
    with pace.saving():
        clock.now += 7
    clock.now += 3
    pace.step_ended()
    assert pace.needed() == 2 * (2 * 3 + 7)
