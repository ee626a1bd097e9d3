"""The thread that looks out for the others: real sockets, several processes' ports in one process."""

import itertools
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from unisono.cluster.liveness import _watchdog
from unisono.cluster.liveness._peer_monitor import PeerMonitor
from unisono.cluster.liveness._status import InFlight, WorkerStatus
from unisono.cluster.liveness._status_server import (
    AbsentError,
    EndedError,
    Peers,
    StatusServer,
    UnreachableError,
)
from unisono.cluster.liveness._watchdog import PeerWatchdog
from unisono.cluster_resolver._spec import Timeouts

#: Between two looks, and for an answer.
SECONDS = 0.1
#: For what must come, on a busy machine.
PATIENCE = 30.0


class Token:
    def __init__(self):
        self.ready = False

    def is_ready(self):
        return self.ready


class Machine:
    """Takes part in TCP as one that is there, stopped, or gone."""

    def __init__(self, kind):
        self._filling = []
        self.status = WorkerStatus()
        if kind == "here":
            self.server = StatusServer("127.0.0.1", self.status, "x")
            self.port = self.server.port
            return
        self.server = None
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0 if kind == "gone" else 16)
        self.port = self._listener.getsockname()[1]
        if kind == "ended":
            self._listener.close()
        # Linux answers no further call when nobody takes those that wait: as if nobody were there.
        while kind == "gone" and not self._is_gone():
            pass

    def _is_gone(self):
        sock = socket.socket()
        sock.settimeout(0.2)
        try:
            sock.connect(("127.0.0.1", self.port))
        except TimeoutError:
            sock.close()
            return True
        self._filling.append(sock)
        return False

    def close(self):
        if self.server is not None:
            self.server.close()
        else:
            self._listener.close()
        for sock in self._filling:
            sock.close()


@pytest.fixture
def watched():
    """A function that starts a lookout beside machines of some kinds, and gives what it was told."""
    opened = []

    def start(*kinds, timeout=SECONDS):
        machines = [Machine(kind) for kind in kinds]
        status = WorkerStatus()
        addresses = ("127.0.0.1:1", *(f"127.0.0.1:{m.port}" for m in machines))
        names = tuple(f"worker {i}" for i in range(len(addresses)))
        monitor = PeerMonitor(status, Peers(0, addresses, names, "x", timeout), 5.0)
        in_flight, ended, words = InFlight(), threading.Event(), []

        def end(word):
            words.append(word)
            ended.set()

        opened.extend([PeerWatchdog(monitor, in_flight, SECONDS, end), *machines])
        start.machines = machines
        return monitor, in_flight, ended, words

    yield start
    for thing in opened:
        thing.close()


@pytest.mark.parametrize(
    ("kind", "error"), [("gone", UnreachableError), ("stopped", AbsentError), ("ended", EndedError)]
)
def test_how_a_process_is_absent(watched, kind, error):
    monitor, *_ = watched(kind)
    assert type(monitor.find_absent()[1]) is error


@pytest.mark.parametrize("kind", ["program", "message"])
def test_who_waits_for_a_machine_that_is_gone_ends_and_tells_the_others(watched, kind):
    monitor, in_flight, ended, words = watched("gone", "here")
    if kind == "program":
        in_flight.note_program(Token())
        assert ended.wait(PATIENCE)
    else:
        with in_flight.collective():
            assert ended.wait(PATIENCE)
    assert "worker 0 of 3 lost worker 1: it did not answer within 0.1 s" in words[0]
    assert "its machine cannot be reached" in words[0]
    assert "worker 2" not in words[0]
    assert monitor.status.abort_reason == words[0]


def test_the_others_hear_it(watched):
    monitor, *_ = watched("gone", "here")
    monitor.broadcast_lost({1: monitor.find_absent()[1]})
    assert monitor.status.abort_reason.count("worker 0 of 3 lost worker 1: ") == 1
    assert watched.machines[1].status.abort_reason == monitor.status.abort_reason


def test_who_was_told_why_all_end_and_still_waits_ends(watched):
    monitor, in_flight, ended, words = watched("here")
    monitor.status.abort_reason = "Somebody is gone."
    in_flight.note_program(Token())
    assert ended.wait(PATIENCE)
    assert words == ["Somebody is gone."]


@pytest.mark.parametrize("kind", ["here", "stopped", "ended"])
def test_nobody_ends_for_one_whose_machine_is_there(watched, kind, caplog):
    """It may be busy; and the end of a process is seen by the collective itself."""
    # One that is here has time to answer, also on a busy machine.
    _, in_flight, ended, words = watched(kind, timeout=PATIENCE if kind == "here" else SECONDS)

    def named():
        return [r for r in caplog.records if "Waiting for worker 1" in r.getMessage()]

    with caplog.at_level("WARNING", "unisono"):
        in_flight.note_program(Token())
        deadline = time.monotonic() + PATIENCE
        while kind != "here" and not named():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not ended.wait(12 * SECONDS)
    assert not words
    # Once, and only of one that does not answer.
    assert len(named()) == (kind != "here")


def test_an_end_that_no_collective_sees_ends_this_process(watched):
    """As between GPUs of one machine, where NCCL may wait for ever."""
    monitor, in_flight, ended, words = watched("ended")
    monitor.status.sees_ends = False
    in_flight.note_program(Token())
    assert ended.wait(PATIENCE)
    assert "lost worker 1" in words[0]


def test_a_machine_that_was_lost_before_is_named_before_who_ended_because_of_it(watched, monkeypatch):
    monitor, in_flight, ended, words = watched("here", "here")
    monitor.status.sees_ends = False
    lost = {2: UnreachableError("its machine cannot be reached")}
    later = {1: EndedError(), **lost}
    answers = itertools.chain([lost], itertools.repeat(later))
    monkeypatch.setattr(monitor, "find_absent", lambda: next(answers))
    in_flight.note_program(Token())
    assert ended.wait(PATIENCE)
    text = "lost worker 2: its machine cannot be reached; worker 1: its process has ended"
    assert text in words[0]


def test_as_long_as_something_goes_on_nobody_is_asked(watched, monkeypatch):
    monitor, in_flight, ended, _ = watched("gone")
    asked, programs = [], itertools.count()
    monkeypatch.setattr(monitor, "find_absent", lambda: asked.append(1) or {})
    # Another one at each look.
    monkeypatch.setattr(InFlight, "oldest", property(lambda self: next(programs)))
    assert not ended.wait(10 * SECONDS)
    monkeypatch.undo()
    monkeypatch.setattr(monitor, "find_absent", lambda: asked.append(1) or {})
    done = Token()
    done.ready = True
    in_flight.note_program(done)
    assert not ended.wait(5 * SECONDS)
    assert next(programs) > 3
    assert not asked


def test_a_token_that_was_taken_over_is_done():
    class Deleted:
        def is_ready(self):
            raise RuntimeError("Array has been deleted")

    in_flight = InFlight()
    in_flight.note_program(Deleted())
    assert in_flight.oldest is None


def test_a_program_beside_the_steps_is_waited_for_although_a_later_step_is_done():
    """A check of weights runs beside steps of which none may need the others."""
    in_flight, beside, step = InFlight(), Token(), Token()
    in_flight.note_concurrent_program(beside)
    in_flight.note_program(step)
    step.ready = True
    first = in_flight.oldest
    assert first is not None
    further = Token()
    in_flight.note_concurrent_program(further)
    assert in_flight.oldest == first
    beside.ready = True
    assert in_flight.oldest not in (None, first)
    further.ready = True
    assert in_flight.oldest is None


class Clock:
    """Time that passes when the thread waits, or asks a machine that is gone."""

    now, ended_at = 0.0, None

    def monotonic(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds
        return self.ended_at is not None

    def find_absent(self):
        self.now += Timeouts().heartbeat
        return {1: UnreachableError("its machine cannot be reached")}

    def end(self, reason):
        self.ended_at = self.now


@pytest.mark.parametrize("begins", [0.0, 0.5, 0.999])
def test_a_machine_that_is_lost_ends_the_run_within_15_seconds(monkeypatch, begins):
    clock, status = Clock(), WorkerStatus()
    monkeypatch.setattr(_watchdog, "time", clock)
    monitor = SimpleNamespace(
        is_aborted=False,
        find_absent=clock.find_absent,
        broadcast_lost=lambda lost: None,
        name_of=str,
        status=status,
    )
    watchdog = object.__new__(PeerWatchdog)
    watchdog._monitor, watchdog._in_flight, watchdog._end = monitor, SimpleNamespace(oldest=1), clock.end
    watchdog._period, watchdog._closed = Timeouts().heartbeat, clock
    watchdog._unreachable_since, watchdog._logged = {}, set()
    watchdog._run()
    # The link is lost at `begins` of the second before the thread looks first.
    assert 3 * Timeouts().heartbeat <= clock.ended_at - begins <= 15
