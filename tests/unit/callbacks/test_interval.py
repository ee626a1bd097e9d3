"""How often a backup is made: times that a test makes up, and a clock that it moves."""

import math

import pytest

from unisono.callbacks._interval import BackupInterval, Costs, WriteRecord, interval_of, sentence


@pytest.mark.parametrize(
    ("costs", "together", "expected"),
    [
        # 1 % of training: a backup costs 2 ms, so one every 200 ms, of 10 ms each.
        (Costs(step=0.01, blocked=0.002, slowed=0.0, written=0.05), 1, 20),
        (Costs(step=0.01, blocked=0.001, slowed=0.001, written=0.05), 1, 20),
        # Rounded up, also to whole executions.
        (Costs(step=0.03, blocked=0.002, slowed=0.0, written=0.05), 1, 7),
        (Costs(step=0.01, blocked=0.002, slowed=0.0, written=0.05), 8, 24),
        # At least one step, one execution.
        (Costs(step=5.0, blocked=0.002, slowed=0.0, written=0.05), 1, 1),
        (Costs(step=5.0, blocked=0.002, slowed=0.0, written=0.05), 4, 4),
        # No backup before the last one is written.
        (Costs(step=0.01, blocked=0.0, slowed=0.0, written=0.505), 1, 51),
        # A failure costs at most 60 s, the writing included, and down to whole executions.
        (Costs(step=0.5, blocked=4.0, slowed=0.0, written=10.0), 1, 100),
        (Costs(step=0.5, blocked=4.0, slowed=0.0, written=10.0), 30, 90),
        # If that cannot be: as often as the disk can.
        (Costs(step=0.5, blocked=4.0, slowed=0.0, written=50.0), 1, 100),
        (Costs(step=0.5, blocked=4.0, slowed=0.0, written=80.0), 1, 160),
    ],
)
def test_the_shortest_interval_within_the_limits(costs, together, expected):
    assert interval_of(costs, together, max_overhead=0.01, max_seconds=60.0) == expected


@pytest.mark.parametrize("cost", [0.001, 0.3, 20.0])
def test_it_is_youngs_interval_for_a_known_time_between_failures(cost):
    share, step = 0.02, 1e-6
    steps = interval_of(Costs(step, cost, 0.0, 0.0), 1, share, math.inf)
    failures = cost / (2 * share**2)
    assert steps * step == pytest.approx(math.sqrt(2 * cost * failures), rel=1e-3)


def test_long_times_are_printed_in_seconds():
    costs = Costs(step=2.0, blocked=1.5, slowed=0.5, written=12.0)
    assert sentence(1, costs, 3_000_000_000) == (
        "a backup every 1 step: state 3 GB, step 2 s; a backup blocks 1.5 s, slows the steps beside it by "
        "500 ms and is written in 12 s (100 % of training)"
    )


class Training:
    """Steps of some seconds each, with backups that take some."""

    def __init__(self, together=1, max_overhead=0.01, max_seconds=60.0):
        self.now, self.batches, self.saved_at, self.together = 0.0, 0, 0, together
        self.said, self.saves = [], []
        self.step, self.slow, self.blocked, self.written = 0.01, 0.01, 0.002, 0.05
        self.busy_until = 0.0
        self.interval = BackupInterval(
            max_overhead, max_seconds, together, self.said.append, lambda: self.now
        )

    def save(self):
        with self.interval.saving():
            self.now += self.blocked
        self.saved_at = self.batches
        self.busy_until = self.now + self.written
        self.saves.append(self.batches)

    def run(self, executions):
        for _ in range(executions):
            busy = self.now < self.busy_until
            self.interval.begin_batch(self.batches, busy, WriteRecord(self.written, 2_800_000))
            if not busy and self.interval.is_due(self.batches - self.saved_at):
                self.save()
            self.now += (self.slow if self.now < self.busy_until else self.step) * self.together
            self.batches += self.together
        return self


def test_the_first_backups_are_measured_and_then_the_interval_is_kept():
    training = Training().run(400)
    assert training.interval.steps == 20
    (said,) = training.said
    assert said.startswith("a backup every 20 steps: state 2.8 MB, step 10 ms; a backup blocks 2 ms, slows ")
    assert "by 0 ms and is written in 50 ms (1 % of training)" in said
    # Two executions compile, two are measured; then as soon as one is written, and eight steps more.
    assert training.saves[:4] == [4, 17, 30, 43]
    assert {b - a for a, b in zip(training.saves[5:], training.saves[6:], strict=False)} == {20}


def test_steps_that_are_slower_beside_the_writing_are_a_cost_of_the_backup():
    training = Training()
    training.slow = 0.02
    training.run(3000)
    # Three steps run beside the 50 ms of writing, and take 30 ms longer; blocked for 2 ms.
    assert training.interval.steps == pytest.approx(320, rel=0.05)


def test_executions_of_several_steps_stay_whole():
    training = Training(together=8).run(200)
    assert training.interval.steps == 24
    assert all(saved % 8 == 0 for saved in training.saves)


def test_a_choice_is_told_again_when_it_has_more_than_doubled_or_halved():
    training = Training().run(400)
    training.blocked = 0.0036
    training.run(400)
    assert training.interval.steps == 36
    assert len(training.said) == 1
    training.blocked = 0.0044
    training.run(500)
    assert training.interval.steps == 44
    assert [said.split(":")[0] for said in training.said] == [
        "a backup every 20 steps",
        "a backup every 44 steps",
    ]


def test_a_backup_is_due_when_the_time_is_over_whatever_was_measured():
    training = Training(max_seconds=30.0)
    training.step = training.slow = 100.0
    training.run(6)
    assert training.saves == [1, 2, 3, 4, 5]
    assert training.interval.steps == 1


def test_what_is_no_step_is_not_measured():
    """The compilation at the start, validation, batches that are passed over."""
    training = Training()
    training.now = 50.0
    training.run(1)
    training.now += 30
    training.run(30)
    for _ in range(5):
        training.interval.pause(training.batches)
        training.now += 7
        training.run(20)
        training.interval.pause(training.batches)
        training.interval.pause(training.batches)
    assert training.interval.steps == 20


def test_a_few_executions_that_compile_do_not_count():
    training = Training().run(100)
    training.now += 1
    training.run(300)
    assert training.interval.steps == 20


def test_nothing_is_due_before_a_batch():
    training = Training()
    assert not training.interval.is_due(5)
    training.run(1)
    assert not training.interval.is_due(0)
