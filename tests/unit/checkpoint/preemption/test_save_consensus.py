"""How workers agree on a step: their answers are gathered in threads, with clocks that the test moves."""

import threading

import pytest

from unisono import ClusterError
from unisono.checkpoint.preemption._save_consensus import PeriodicConsensus, SaveConsensus


class Workers:
    """Agreements of workers whose steps take so many seconds, and that ask each other."""

    def __init__(self, *seconds, period=1.0):
        self.seconds, self.now = seconds, 0.0
        self._barrier = threading.Barrier(len(seconds), timeout=60)
        self._data = [b""] * len(seconds)
        self._clocks = [0.0] * len(seconds)
        self.every = [
            PeriodicConsensus(lambda data, i=i: self._gather(i, data), period, lambda i=i: self._clocks[i])
            for i in range(len(seconds))
        ]

    def _gather(self, i, data):
        self._data[i] = data
        self._barrier.wait()
        every = list(self._data)
        self._barrier.wait()
        return every

    def together(self, do):
        """What `do(i, agreement)` returns in a thread of each worker; an exception counts as its result."""
        found = [None] * len(self.every)

        def work(i, agreement):
            try:
                found[i] = do(i, agreement)
            except Exception as error:
                found[i] = error

        threads = [threading.Thread(target=work, args=pair) for pair in enumerate(self.every)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        return found

    def run(self, steps, wants, first=1):
        """After which step each agrees on one, and which, at the latest after `steps`."""

        def loop(i, agreement):
            for step in range(first, first + steps):
                self._clocks[i] += self.seconds[i]
                agreed = agreement.agree(step, wants(i, step))
                if agreed is not None:
                    return step, agreed
            return None

        return self.together(loop)


def test_one_process_agrees_with_itself():
    alone = SaveConsensus()
    alone.begin(5)
    assert alone.agree(7, False) is None
    assert alone.agree(7, True) == 7
    assert alone.delay == 0


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("when", [1, 2, 6, 100])
def test_all_agree_on_a_step_soon_after_one_wants_to(who, when):
    workers = Workers(0.01, 0.013)
    found = workers.run(400, lambda i, step: i == who and step >= when)
    assert found[0] == found[1]
    step, agreed = found[0]
    assert step == agreed
    # The questions are a second apart, and at the start closer.
    assert when <= step <= when + 1.0 / 0.013


def test_there_are_few_questions_where_steps_are_short_and_one_per_step_where_they_are_long():
    short, long = Workers(0.001, 0.002), Workers(3.0, 0.1)
    for workers in (short, long):
        assert workers.run(1000, lambda i, step: False) == [None, None]
    assert {a.questions for a in short.every} == {10}
    assert {a.questions for a in long.every} == {1000}


def test_a_worker_that_compiled_is_asked_again_soon():
    workers = Workers(50.0, 50.0)
    workers.run(1, lambda i, step: False)
    workers.seconds = (0.01, 0.01)
    workers.run(200, lambda i, step: False, first=2)
    # 1, 2, 4, 8, 16, 32, 64, 128, and none before 200.
    assert {a.questions for a in workers.every} == {8}


def test_a_word_before_the_last_step_is_heard_after_it():
    workers = Workers(0.001, 0.001)
    workers.run(21, lambda i, step: False)
    assert workers.together(lambda i, a: a.agree(22, i == 1)) == [None, None]
    assert workers.together(lambda i, a: a.agree(22, i == 1, is_last=True)) == [22, 22]


def test_nobody_ends_before_all_have_saved():
    workers, saved, ended = Workers(1.0, 1.0), threading.Event(), threading.Event()

    def end(i, agreement):
        if i == 0:
            # The other one has time to end too early.
            ended.wait(0.1)
            saved.set()
        agreement.finish()
        ended.set()
        return saved.is_set()

    assert workers.together(end) == [True, True]


def test_all_must_go_on_after_the_same_step():
    workers = Workers(1.0, 1.0, 1.0)
    assert workers.together(lambda i, agreement: agreement.begin(16)) == [None] * 3
    for error in workers.together(lambda i, agreement: agreement.begin(16 * (i > 0))):
        assert isinstance(error, ClusterError)
        assert "0 on worker 0, 16 on worker 1, 16 on worker 2. Pass a directory that all" in str(error)
