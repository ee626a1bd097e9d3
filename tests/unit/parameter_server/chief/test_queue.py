"""The queue of closures with workers that the test plays."""

import threading
from concurrent.futures import Future

import pytest
from tests.support import LIMIT

from unisono._errors import CancelledError
from unisono.parameter_server.chief._closures import Rules
from unisono.parameter_server.chief._queue import ClosureQueue, NotReadyError, WorkerLostError

NO_BOUND = Rules()


class Workers:
    """Keeps what was sent; the test answers."""

    def __init__(self, rules=NO_BOUND, prepare=lambda payload, needs: None):
        self.sent, self.lost = [], []
        self.queue = ClosureQueue(rules, self.send, prepare, lambda worker, error: self.lost.append(worker))

    def send(self, worker, closures, watermark):
        replies = [Future() for _ in closures]
        for closure, reply in zip(closures, replies, strict=True):
            self.sent.append((worker, closure.number, closure.payload, watermark, reply))
        return replies

    def answer(self, index, result=None):
        reply = self.sent[index][-1]
        if isinstance(result, Exception):
            reply.set_exception(result)
        else:
            reply.set_result(result)

    @property
    def calls(self):
        return [(worker, number) for worker, number, *_ in self.sent]


def test_results_come_back_and_the_watermark_moves():
    workers = Workers()
    futures = [workers.queue.schedule(name) for name in "abc"]
    assert not workers.sent
    assert not workers.queue.done()
    workers.queue.worker_came(0)
    workers.queue.worker_came(1)
    assert workers.calls == [(0, 0), (0, 1), (1, 2)]
    workers.answer(0, "A")
    workers.answer(1, "B")
    assert [workers.queue.result(f) for f in futures[:2]] == ["A", "B"]
    futures.append(workers.queue.schedule("d"))
    assert workers.sent[-1][3] == 2
    workers.answer(2, "C")
    workers.answer(3, "D")
    workers.queue.join()
    assert workers.queue.done()
    assert [f.result() for f in futures[2:]] == ["C", "D"]


def test_a_lost_workers_closures_run_again_under_their_numbers():
    workers = Workers(Rules(per_worker=1))
    workers.queue.worker_came(0)
    future = workers.queue.schedule("a")
    workers.answer(0, WorkerLostError("gone"))
    assert workers.lost == [0]
    assert not future.done()
    workers.queue.worker_came(1)
    assert workers.calls == [(0, 0), (1, 0)]
    workers.answer(1, "A")
    assert workers.queue.result(future) == "A"


def test_a_late_reply_is_none_of_the_next_attempt_on_the_same_worker():
    """Found by the simulation: a worker that had missed its dataset failed a closure that it had again."""
    workers = Workers()
    workers.queue.worker_came(0)
    future = workers.queue.schedule("a")
    workers.queue.worker_lost(0, WorkerLostError("gone"))
    workers.queue.worker_came(0)
    assert workers.calls == [(0, 0), (0, 0)]
    workers.answer(0, KeyError("no dataset"))
    workers.answer(1, "A")
    assert workers.queue.result(future) == "A"
    workers.queue.join()


def test_the_first_error_is_raised_once_and_the_rest_is_cancelled():
    workers = Workers(Rules(per_worker=2))
    workers.queue.worker_came(0)
    running, other, waiting = (workers.queue.schedule(name) for name in "abc")
    workers.answer(0, ZeroDivisionError("by a"))
    with pytest.raises(CancelledError, match=r"The corresponding function is cancelled. Please reschedule"):
        workers.queue.result(waiting)
    # Nothing is raised while one still runs.
    assert not workers.queue.done()
    workers.answer(1, ValueError("by b"))
    with pytest.raises(ZeroDivisionError, match="by a"):
        workers.queue.join()
    with pytest.raises(ZeroDivisionError):
        workers.queue.result(running)
    with pytest.raises(ValueError, match="by b"):
        workers.queue.result(other)
    workers.queue.join()
    again = workers.queue.schedule("again")
    workers.answer(2, 1)
    assert workers.queue.result(again) == 1


def test_schedule_raises_the_error_of_an_earlier_closure():
    workers = Workers()
    workers.queue.worker_came(0)
    workers.queue.schedule("a")
    workers.answer(0, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        workers.queue.schedule("b")
    workers.queue.schedule("c")
    assert [payload for _, _, payload, *_ in workers.sent] == ["a", "c"]


def test_what_a_worker_needs_is_prepared_by_who_waits():
    seen = []
    workers = Workers(prepare=lambda payload, needs: seen.append((payload, needs, threading.get_ident())))
    workers.queue.worker_came(0)
    future = workers.queue.schedule("a")
    thread = threading.Thread(target=workers.answer, args=(0, NotReadyError("form")))
    thread.start()
    thread.join()
    assert not seen
    assert workers.calls == [(0, 0)]
    threading.Timer(0.05, lambda: workers.answer(1, "A")).start()
    while len(workers.sent) < 2:
        workers.queue.done()
    assert workers.queue.result(future) == "A"
    assert seen == [("a", "form", threading.get_ident())]
    assert workers.calls == [(0, 0), (0, 0)]


def test_an_error_while_preparing_is_the_closures():
    def prepare(payload, needs):
        raise TypeError("cannot be traced")

    workers = Workers(prepare=prepare)
    workers.queue.worker_came(0)
    future = workers.queue.schedule("a")
    workers.answer(0, NotReadyError("form"))
    with pytest.raises(TypeError, match="cannot be traced"):
        workers.queue.join()
    assert isinstance(future.exception(), TypeError)


def test_one_that_needs_something_after_another_has_failed_is_cancelled():
    """Found by the simulation: its result was waited for without end."""
    prepared = []
    workers = Workers(prepare=lambda payload, needs: prepared.append(payload))
    workers.queue.worker_came(0)
    workers.queue.schedule("a")
    future = workers.queue.schedule("b")
    workers.answer(0, ZeroDivisionError())
    workers.answer(1, NotReadyError("form"))
    with pytest.raises(ZeroDivisionError):
        workers.queue.join()
    assert isinstance(future.exception(timeout=0), CancelledError)
    assert not prepared
    workers.queue.schedule("c")
    assert workers.calls == [(0, 0), (0, 1), (0, 2)]


def test_one_that_is_prepared_when_another_fails_is_cancelled():
    workers = Workers(prepare=lambda payload, needs: workers.answer(0, ZeroDivisionError()))
    workers.queue.worker_came(0)
    workers.queue.schedule("a")
    future = workers.queue.schedule("b")
    workers.answer(1, NotReadyError("form"))
    with pytest.raises(ZeroDivisionError):
        workers.queue.join()
    assert isinstance(future.exception(timeout=0), CancelledError)
    assert workers.calls == [(0, 0), (0, 1)]


def test_schedule_waits_while_the_queue_is_full():
    workers = Workers(Rules(queue=2, per_worker=1))
    workers.queue.schedule("a")
    workers.queue.schedule("b")
    done = []
    thread = threading.Thread(target=lambda: done.append(workers.queue.schedule("c")))
    thread.start()
    thread.join(0.05)
    assert not done
    workers.queue.worker_came(0)
    thread.join(LIMIT)
    assert done


def test_after_an_abort_everything_raises():
    workers = Workers()
    future = workers.queue.schedule("a")
    workers.queue.abort(OSError("over"))
    for call in (workers.queue.join, lambda: workers.queue.schedule("b"), workers.queue.done):
        with pytest.raises(OSError, match="over"):
            call()
    with pytest.raises(OSError, match="over"):
        workers.queue.result(future)


def test_thousands_of_closures_that_end_at_once():
    def send(worker, closures, watermark):
        done = [Future() for _ in closures]
        for closure, each in zip(closures, done, strict=True):
            each.set_result(closure.payload)
        return done

    queue = ClosureQueue(Rules(), send, lambda *_: None, lambda *_: None)
    futures = [queue.schedule(i) for i in range(3000)]
    queue.worker_came(0)
    queue.join()
    assert [f.result() for f in futures] == list(range(3000))


def test_after_an_error_of_the_caller_nothing_waits_but_all_runs():
    workers = Workers(Rules(per_worker=1))
    workers.queue.worker_came(0)
    outer = workers.queue.schedule("outer")
    first = workers.queue.next_number
    futures = [workers.queue.schedule(name) for name in "ab"]
    workers.queue.leave(first, drops=False)
    for future in futures:
        with pytest.raises(CancelledError):
            workers.queue.result(future)
    for index in range(3):
        workers.answer(index, index)
    workers.queue.join()
    assert workers.calls == [(0, 0), (0, 1), (0, 2)]
    assert outer.result() == 0


def test_an_interrupt_drops_what_no_worker_was_sent_and_forgets_errors_of_the_rest():
    workers = Workers(Rules(per_worker=1))
    workers.queue.worker_came(0)
    futures = [workers.queue.schedule(name) for name in "abc"]
    assert workers.queue.leave(0, drops=True) == range(1)
    for future in futures:
        with pytest.raises(CancelledError):
            workers.queue.result(future)
    # The next one runs behind what a worker still has; a dropped number is given again.
    following = workers.queue.schedule("d")
    assert workers.calls == [(0, 0)]
    workers.answer(0, ValueError("of one that was left"))
    workers.answer(1, "D")
    workers.queue.join()
    assert workers.calls == [(0, 0), (0, 1)]
    assert workers.sent[1][2] == "d"
    assert following.result() == "D"


def test_one_that_was_left_and_whose_worker_is_lost_runs_again_whole():
    workers = Workers(Rules(per_worker=1))
    workers.queue.worker_came(0)
    workers.queue.schedule("a")
    workers.queue.leave(0, drops=True)
    # Its worker may have pushed to one of two servers.
    workers.answer(0, WorkerLostError("gone"))
    workers.queue.worker_came(1)
    assert workers.calls == [(0, 0), (1, 0)]
    workers.answer(1, "A")
    workers.queue.join()


def test_one_that_was_left_while_it_waits_for_a_program_is_dropped():
    workers = Workers()
    workers.queue.worker_came(0)
    workers.queue.schedule("a")
    workers.answer(0, NotReadyError("form"))
    workers.queue.leave(0, drops=True)
    workers.queue.join()
    assert workers.calls == [(0, 0)]


def test_an_interrupt_while_something_is_prepared_leaves_a_queue_that_goes_on():
    def prepare(payload, needs):
        if not prepared:
            prepared.append(1)
            raise KeyboardInterrupt

    prepared = []
    workers = Workers(prepare=prepare)
    workers.queue.worker_came(0)
    workers.queue.schedule("a")
    workers.answer(0, NotReadyError("form"))
    with pytest.raises(KeyboardInterrupt):
        workers.queue.join()
    assert not workers.queue.done()
    workers.answer(1, "A")
    workers.queue.join()


def test_a_join_is_woken_by_the_last_closure_and_not_by_each(monkeypatch):
    workers = Workers(Rules(per_worker=1))
    workers.queue.worker_came(0)
    for name in "abc":
        workers.queue.schedule(name)
    woken, changed = [], workers.queue._changed
    notify_all, wait = changed.notify_all, changed.wait
    waits = threading.Event()
    monkeypatch.setattr(changed, "notify_all", lambda: (woken.append(len(workers.sent)), notify_all()))
    # Only a notification ends the wait.
    monkeypatch.setattr(changed, "wait", lambda seconds: (waits.set(), wait(LIMIT))[1])
    joins = threading.Thread(target=workers.queue.join, daemon=True)
    joins.start()
    assert waits.wait(LIMIT)
    for index in range(3):
        assert not woken
        workers.answer(index)
    joins.join(LIMIT)
    assert not joins.is_alive()
    assert len(woken) == 1
