"""What the chief decides about closures: which worker runs which one, and what a failure means. Pure.

A closure is a scheduled call. It has a number, which it keeps when it runs again on another worker, so that
servers apply its update once. The state here is a frozen record; the shell around it (`_queue`) sends
what was decided, and reports what came back.

Tests: tests/unit/parameter_server/chief/test_closures.py.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from unisono.parameter_server.state._push import COUNTER_BITS

#: As many closures may wait as in TensorFlow's coordinator; `schedule` then waits, too.
QUEUE_LIMIT = 262_144

#: Closures go in one message where for each of them, and for each worker, so many wait: towards the end of
#: what was scheduled they go one by one, so that a slow worker does not keep the others waiting.
_WAIT_FOR_EACH = 16


@dataclasses.dataclass(frozen=True)
class Rules:
    """What limits the closures in flight.

    Args:
        max_staleness: how many other updates may be applied between a closure's pull and its own update;
            None for no bound, 0 for one closure at a time.
        per_worker: how many closures a worker is sent at most: one that it runs, and one that it has when
            it is done.
        queue: how many closures may wait.
        together: how many go to a worker in one message at most; `per_worker` counts messages then.
    """

    max_staleness: int | None = None
    per_worker: int = 2
    queue: int = QUEUE_LIMIT
    together: int = 4


@dataclasses.dataclass(frozen=True)
class SentClosure:
    """A closure that a worker was sent.

    Args:
        before: how many closures had been sent before it that were not in flight any more.
    """

    number: int
    worker: int
    before: int = 0


@dataclasses.dataclass(frozen=True)
class Closures:
    """All closures of a chief.

    Args:
        started: the number of the first closure that was never sent; those from it on wait.
        retries: closures that were sent and came back; they run before those that wait.
        sent: how many closures were sent, each as often as it was.

    >>> state = Closures.of_generation(0, workers=[0, 1])
    >>> state, first = schedule(state)
    >>> state = start(state, Rules())
    >>> state.running, is_done(state), is_done(finish(state, first))
    ((SentClosure(number=0, worker=0, before=0),), False, True)
    """

    scheduled: int
    started: int
    retries: tuple[int, ...] = ()
    running: tuple[SentClosure, ...] = ()
    workers: tuple[int, ...] = ()
    failed: int | None = None
    last: int = -1
    sent: int = 0

    @classmethod
    def of_generation(cls, generation: int, workers: Sequence[int] = ()) -> Closures:
        """Return the state of a chief that has scheduled nothing.

        Args:
            generation: how often the chief was started before: its numbers are larger than all earlier ones.
        """
        first = generation << COUNTER_BITS
        return cls(first, first, workers=tuple(workers))

    @property
    def num_waiting(self) -> int:
        """How many closures wait for a worker."""
        return self.scheduled - self.started + len(self.retries)

    @property
    def watermark(self) -> int:
        """The number below which every closure has ended: servers may forget that they applied it."""
        return min([self.started, *self.retries, *(r.number for r in self.running)])

    def others(self, running: SentClosure) -> int:
        """Return how many other closures were in flight at any time since a closure was sent.

        At most so many updates can be applied between its pull and its own.
        """
        return self.sent - running.before - 1

    def worker_of(self, number: int) -> int | None:
        """Return which worker has a closure; None where none has."""
        return next((r.worker for r in self.running if r.number == number), None)


def has_room(state: Closures, rules: Rules) -> bool:
    """Return whether one more closure may be scheduled now."""
    return state.failed is None and state.num_waiting < rules.queue


def schedule(state: Closures) -> tuple[Closures, int]:
    """Return the state with one more closure, and its number."""
    return dataclasses.replace(state, scheduled=state.scheduled + 1), state.scheduled


def start(state: Closures, rules: Rules) -> Closures | None:
    """Return the state after the next closures were sent, the last of `running`; None where none may be.

    The worker with the fewest closures gets them, in turn: one, or several where many wait.
    """
    if state.failed is not None or not state.num_waiting or not _keeps_bound(state, rules.max_staleness):
        return None
    count = _together(state, rules)
    counts = collections.Counter(r.worker for r in state.running)
    free = [w for w in state.workers if counts[w] + count <= rules.per_worker * count]
    if not free:
        return None
    worker = min(free, key=lambda w: (counts[w], w <= state.last, w))
    for _ in range(count):
        state = _sent(state, worker)
    return state


def _together(state: Closures, rules: Rules) -> int:
    """Return how many closures go in the next message."""
    if rules.max_staleness is not None or state.retries or not state.workers:
        return 1
    return max(1, min(rules.together, state.num_waiting // (_WAIT_FOR_EACH * len(state.workers))))


def _sent(state: Closures, worker: int) -> Closures:
    """Return the state after the next closure was sent to a worker."""
    number = min(state.retries) if state.retries else state.started
    # A closure that came back may have been waiting on a lost worker: its number is the smallest one.
    retries = tuple(n for n in state.retries if n != number)
    new = SentClosure(number, worker, state.sent - len(state.running))
    return dataclasses.replace(
        state,
        started=state.started if state.retries else state.started + 1,
        retries=retries,
        running=(*state.running, new),
        last=worker,
        sent=state.sent + 1,
    )


def _keeps_bound(state: Closures, bound: int | None) -> bool:
    """Return whether every closure in flight keeps the bound of staleness with one more beside it.

    In the worst case, all others are applied between its pull and its own update.
    """
    if bound is None:
        return True
    return len(state.running) <= bound and all(state.others(r) < bound for r in state.running)


def finish(state: Closures, number: int) -> Closures:
    """Return the state after a worker has replied with a closure's results, or was asked to leave it.

    Args:
        number: of the closure; one that runs no more, as after a late reply, changes nothing.
    """
    return dataclasses.replace(state, running=_without(state, number))


def fail(state: Closures, number: int) -> Closures:
    """Return the state after a closure's own error: the first one counts, and those that wait are dropped."""
    failed = number if state.failed is None else state.failed
    return dataclasses.replace(
        state, running=_without(state, number), failed=failed, started=state.scheduled, retries=()
    )


def drop(state: Closures, first: int) -> Closures:
    """Return the state without the closures that were never sent, from a number on.

    Those that a lost worker had stay: it may have pushed a part of their changes.
    """
    return dataclasses.replace(state, scheduled=max(state.started, min(first, state.scheduled)))


def put_back(state: Closures, number: int) -> Closures:
    """Return the state after a closure came back, to be run again before those that wait.

    After an error it is dropped, as those that wait were.
    """
    if state.worker_of(number) is None:
        return state
    back = () if state.failed is not None else (number,)
    return dataclasses.replace(state, running=_without(state, number), retries=(*state.retries, *back))


def lose(state: Closures, worker: int) -> Closures:
    """Return the state after a worker was lost: others run its closures."""
    for running in state.running:
        if running.worker == worker:
            state = put_back(state, running.number)
    return dataclasses.replace(state, workers=tuple(w for w in state.workers if w != worker))


def join(state: Closures, worker: int) -> Closures:
    """Return the state after a worker has come, or has come again."""
    return dataclasses.replace(state, workers=tuple(sorted({*state.workers, worker})))


def is_done(state: Closures) -> bool:
    """Return whether nothing waits and nothing runs."""
    return not state.num_waiting and not state.running


def can_raise(state: Closures) -> bool:
    """Return whether an error is to be raised now: when nothing runs any more."""
    return state.failed is not None and not state.running


def forget_error(state: Closures) -> Closures:
    """Return the state after the error was raised, which happens once."""
    return dataclasses.replace(state, failed=None)


def _without(state: Closures, number: int) -> tuple[SentClosure, ...]:
    return tuple(r for r in state.running if r.number != number)


@dataclasses.dataclass(frozen=True)
class Absence:
    """A worker that is not there.

    Args:
        tries: how often it was asked since.
    """

    worker: int
    since: float
    tries: int = 0

    @property
    def next_try(self) -> float:
        """The time of the next question: after 0.1 s, then at growing distances, at most 2 s."""
        # 0.1 + 0.2 + 0.4 + 0.8 + 1.6 s, and then every 2 s.
        early = min(self.tries, 5)
        waited: float = 0.1 * 2**early + 2.0 * (self.tries - early)
        return self.since + waited


def to_ask(absent: Sequence[Absence], now: float) -> list[Absence]:
    """Return the absent workers that are to be asked now whether they are there again."""
    return [a for a in absent if a.next_try <= now]


def given_up(absent: Sequence[Absence], num_workers: int, now: float, limit: float) -> list[int]:
    """Return the workers that are waited for no longer: all, where none was there for `limit` seconds."""
    if len(absent) < num_workers or any(now - a.since < limit for a in absent):
        return []
    return [a.worker for a in absent]
