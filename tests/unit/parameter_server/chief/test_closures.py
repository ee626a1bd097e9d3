"""Tables of what the chief decides, and random runs of a whole cluster that a checker of histories reads."""

import dataclasses
import random

import pytest
from tests.ps_history import Event, HistoryError, check_history

from unisono.parameter_server.chief import _closures
from unisono.parameter_server.chief._closures import (
    Absence,
    Closures,
    Rules,
    can_raise,
    fail,
    finish,
    forget_error,
    given_up,
    has_room,
    is_done,
    join,
    lose,
    put_back,
    schedule,
    start,
    to_ask,
)

NO_BOUND = Rules()


def scheduled(count, workers=(0, 1), generation=0):
    state = Closures.of_generation(generation, workers)
    for _ in range(count):
        state, _ = schedule(state)
    return state


def started(state, rules=NO_BOUND):
    while (following := start(state, rules)) is not None:
        state = following
    return state


def pairs(state):
    return [(r.number, r.worker) for r in state.running]


def test_closures_go_to_the_workers_in_turn_two_to_each():
    state = started(scheduled(7))
    assert pairs(state) == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert state.num_waiting == 3
    assert state.watermark == 0
    state = started(finish(state, 1))
    assert pairs(state) == [(0, 0), (2, 0), (3, 1), (4, 1)]
    # Closure 0 still runs: servers must remember all that came after it.
    assert state.watermark == 0
    assert finish(state, 0).watermark == 2


def test_where_many_wait_several_go_together():
    # Four to a message while 128 wait, three while 96 do: two messages of three to each worker.
    state = started(scheduled(108))
    assert pairs(state) == [(n, n // 3 % 2) for n in range(12)]
    state = finish(finish(state, 0), 1)
    assert start(state, NO_BOUND) is None
    state = started(finish(state, 2))
    assert pairs(state)[-3:] == [(12, 0), (13, 0), (14, 0)]
    # Towards the end one by one.
    state = started(Closures(108, 106, running=state.running[:9], workers=(0, 1)))
    assert pairs(state)[-1] == (11, 1)
    assert len(started(scheduled(500), Rules(max_staleness=9)).running) == 4
    # What came back goes first, one by one.
    state = put_back(started(scheduled(500), Rules(together=1)), 0)
    assert pairs(start(finish(state, 2), NO_BOUND)) == [(1, 1), (3, 1), (0, 0)]


def test_numbers_of_a_restarted_chief_are_larger_than_all_earlier_ones():
    earlier = scheduled(3)
    later, number = schedule(Closures.of_generation(1, [0]))
    assert number == 1 << 40 > earlier.scheduled
    assert later.watermark == number


@pytest.mark.parametrize(("bound", "most"), [(None, 4), (0, 1), (1, 2), (2, 3), (3, 4), (100, 4)])
def test_how_many_closures_a_bound_of_staleness_allows_at_once(bound, most):
    assert len(started(scheduled(9), Rules(max_staleness=bound)).running) == most


def test_a_bound_also_counts_updates_of_closures_that_have_ended():
    rules = Rules(max_staleness=1)
    state = started(scheduled(5), rules)
    assert pairs(state) == [(0, 0), (1, 1)]
    assert [state.others(running) for running in state.running] == [1, 1]
    # Closure 1 may have pulled before 0 was applied: a third one could be applied before it, too.
    state = finish(state, 0)
    assert start(state, rules) is None
    state = started(finish(state, 1), rules)
    assert pairs(state) == [(2, 0), (3, 1)]
    assert [state.others(running) for running in state.running] == [1, 1]


def test_a_lost_workers_closures_run_first_under_their_numbers():
    state = started(scheduled(8))
    state = lose(state, 1)
    assert state.workers == (0,)
    assert state.retries == (1, 3)
    assert state.watermark == 0
    state = started(finish(finish(state, 0), 2))
    assert pairs(state) == [(1, 0), (3, 0)]
    state = started(join(state, 1))
    assert pairs(state) == [(1, 0), (3, 0), (4, 1), (5, 1)]


def test_without_workers_closures_wait():
    state = lose(lose(started(scheduled(2)), 0), 1)
    assert start(state, Rules()) is None
    assert not is_done(state)
    assert state.retries == (0, 1)
    assert pairs(started(join(state, 1))) == [(0, 1), (1, 1)]


def test_a_late_reply_of_a_lost_worker_changes_nothing():
    state = lose(started(scheduled(1)), 0)
    assert finish(state, 0) == put_back(state, 0) == state


def test_the_first_error_wins_and_what_waits_is_dropped():
    state = started(scheduled(9))
    state = fail(fail(state, 2), 1)
    assert state.failed == 2
    assert state.num_waiting == 0
    assert start(state, Rules()) is None
    assert not has_room(state, Rules())
    assert not can_raise(state)
    assert pairs(state) == [(0, 0), (3, 1)]
    # A cancelled closure of a lost worker does not run again.
    state = finish(lose(state, 1), 0)
    assert can_raise(state)
    assert is_done(state)
    state = forget_error(state)
    assert not can_raise(state)
    assert has_room(state, Rules())
    # The next closure has a number of its own.
    assert schedule(state)[1] == 9


def test_a_closure_that_came_back_runs_before_those_that_wait():
    state = started(scheduled(6))
    state = put_back(state, 2)
    assert pairs(started(state))[-1] == (2, 0)


def test_the_queue_has_a_limit():
    rules = Rules(queue=3)
    state = scheduled(3, workers=())
    assert not has_room(state, rules)
    assert has_room(started(join(state, 0)), rules)


@pytest.mark.parametrize(
    ("tries", "after"), [(0, 0.1), (1, 0.2), (2, 0.4), (3, 0.8), (4, 1.6), (5, 3.2), (6, 5.2), (7, 7.2)]
)
def test_absent_workers_are_asked_at_growing_distances(tries, after):
    absence = Absence(0, since=100.0, tries=tries)
    assert absence.next_try == pytest.approx(100.0 + after)
    assert to_ask([absence], absence.next_try - 0.01) == []
    assert to_ask([absence], absence.next_try) == [absence]


def test_workers_are_given_up_when_all_are_away_for_long():
    absent = [Absence(0, since=10.0), Absence(1, since=20.0)]
    assert given_up(absent, 2, now=29.0, limit=10.0) == []
    assert given_up(absent, 2, now=30.0, limit=10.0) == [0, 1]
    assert given_up(absent, 3, now=99.0, limit=10.0) == []


# --- random runs -------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Worker:
    """A worker as the network sees it: closures that it was sent, and how far it is with the first."""

    sent: list = dataclasses.field(default_factory=list)
    #: Servers that the first closure has pushed to.
    pushed: int = 0
    is_pulled: bool = False
    is_there: bool = True


class _Cluster:
    """A chief, workers and servers that take steps in a random order; workers die between any two steps."""

    def __init__(self, seed, rules, workers=3, servers=2, closures=40):
        self.draw, self.rules = random.Random(seed), rules
        self.workers = [_Worker() for _ in range(workers)]
        self.servers = [set() for _ in range(servers)]
        self.state = scheduled(0, workers=range(workers))
        self.left = closures
        self.events = []

    def run(self, deaths):
        while self.left or not is_done(self.state):
            actions = [(w, self.work) for w in self.workers if w.is_there and w.sent]
            actions += [(w, self.restart) for w in self.workers if not w.is_there]
            if self.left:
                actions.append((None, self.schedule))
            if deaths and self.draw.random() < 0.1:
                deaths -= 1
                actions = [(self.draw.choice(self.workers), self.kill)]
            worker, action = self.draw.choice(actions)
            action(worker)
            self.start()
        return self.events

    def schedule(self, _):
        self.left -= 1
        self.state, number = schedule(self.state)
        self.events.append(Event("schedule", number))

    def start(self):
        while (following := start(self.state, self.rules)) is not None:
            for new in following.running[len(self.state.running) :]:
                self.workers[new.worker].sent.append(new.number)
            self.state = following

    def work(self, worker):
        number = worker.sent[0]
        if not worker.is_pulled:
            worker.is_pulled = True
            self.events.append(Event("pull", number))
        elif worker.pushed < len(self.servers):
            server = worker.pushed
            worker.pushed += 1
            if number not in self.servers[server]:
                self.servers[server].add(number)
                self.events.append(Event("apply", number, server))
        else:
            worker.sent.pop(0)
            worker.pushed, worker.is_pulled = 0, False
            self.events.append(Event("acknowledge", number))
            self.state = finish(self.state, number)
            # A server forgets what is below the watermark: nothing below may be applied later.
            for applied in self.servers:
                applied -= {n for n in applied if n < self.state.watermark}

    def kill(self, worker):
        worker.is_there, worker.sent, worker.pushed, worker.is_pulled = False, [], 0, False
        self.state = lose(self.state, self.workers.index(worker))

    def restart(self, worker):
        worker.is_there = True
        self.state = join(self.state, self.workers.index(worker))


@pytest.mark.parametrize(("bound", "wait_for"), [(0, 1), (1, 16), (2, 16), (5, 1), (None, 16), (None, 1)])
def test_random_runs_apply_each_update_once_within_the_bound(bound, wait_for, monkeypatch):
    monkeypatch.setattr(_closures, "_WAIT_FOR_EACH", wait_for)
    for seed in range(60):
        cluster = _Cluster(seed, Rules(max_staleness=bound))
        events = cluster.run(deaths=seed % 7)
        stalest = check_history(events, servers=2, max_staleness=bound)
        assert bound != 0 or stalest == 0
    assert bound == 0 or stalest > 0


def test_the_checker_finds_what_is_wrong():
    whole = [Event("schedule", 0), Event("pull", 0), Event("apply", 0, 0), Event("acknowledge", 0)]
    assert check_history(whole, servers=1, max_staleness=0) == 0
    with pytest.raises(HistoryError, match="closure 0 was applied 2 times on server 0"):
        check_history([*whole, Event("apply", 0, 0)], servers=1)
    with pytest.raises(HistoryError, match="closure 0 was applied 0 times on server 1"):
        check_history(whole, servers=2)
    two = [Event("schedule", n) for n in (0, 1)] + [Event("pull", n) for n in (0, 1)]
    two += [Event("apply", n, 0) for n in (0, 1)]
    assert check_history(two, servers=1, max_staleness=1) == 1
    with pytest.raises(HistoryError, match=r"closure 1 missed 1 other .* bound is 0"):
        check_history(two, servers=1, max_staleness=0)


def test_a_wrong_rule_is_found_by_the_checker():
    # A chief that ignores its bound.
    cluster = _Cluster(3, Rules(max_staleness=None))
    with pytest.raises(HistoryError, match="bound is 0"):
        check_history(cluster.run(deaths=0), servers=2, max_staleness=0)
