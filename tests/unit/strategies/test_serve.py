"""What a worker or a parameter server does until its chief ends the job."""

import os
import signal
import socket
import threading
import time

import pytest
from tests.support import LIMIT

from unisono._errors import ClusterError, InvalidArgumentError
from unisono._system._lease import Lease
from unisono.cluster.rendezvous import _addresses
from unisono.cluster_resolver._base import seconds_of
from unisono.cluster_resolver._spec import ClusterSpec, Task
from unisono.parameter_server.server._chief_presence import chief_lease, leave_end_marker
from unisono.parameter_server.strategy import _serve
from unisono.parameter_server.strategy._roles import roles_of
from unisono.parameter_server.strategy._serve import (
    CHIEF_VARIABLE,
    Service,
    durable_store,
)

SPEC = ClusterSpec({"chief": ["a:1"], "worker": ["b:1"], "ps": ["localhost:1"]})


class Served(Service):
    """Serves nothing."""

    exit_code, chief_lease = 0, None

    def __init__(self):
        super().__init__(roles_of(SPEC, Task("ps", 0)))
        self.ended, self.is_closed = threading.Event(), False
        self.chief_lease = chief_lease()

    def close(self):
        self.is_closed = True


def test_a_task_whose_chief_has_vanished_ends_and_names_it(monkeypatch):
    monkeypatch.setenv(CHIEF_VARIABLE, "0.2")
    served = Served()
    with pytest.raises(ClusterError, match=r"no sign of chief:0 at a:1 for 0\.2 s; ps:0 ends"):
        served.join()
    assert served.is_closed


def test_a_task_says_once_that_its_chief_was_not_there_yet(monkeypatch, tuned, caplog):
    tuned(_serve, WARN_AFTER=0.05)
    monkeypatch.setenv(CHIEF_VARIABLE, "0.5")
    with pytest.raises(ClusterError):
        Served().join()
    said = [r.getMessage() for r in caplog.records if "waits for" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("ps:0 waits for chief:0 at a:1, which has sent nothing for 0 s.")
    seen = Served()
    seen.chief_lease.renew()
    with pytest.raises(ClusterError):
        seen.join()
    assert len([r for r in caplog.records if "waits for" in r.getMessage()]) == 1


def test_tasks_name_hosts_that_their_machine_does_not_know(monkeypatch, caplog):
    monkeypatch.setattr(_addresses, "resolve", unknown_if_invalid)
    spec = ClusterSpec({"chief": ["host7.invalid:1"], "worker": ["b:1"], "ps": ["localhost:1"]})
    _serve.warn_of_unknown_names(roles_of(spec, Task("ps", 0)))
    until(lambda: caplog.records)
    assert "The name 'host7.invalid' of a host of the cluster is not known" in caplog.text
    until(lambda: not [t for t in threading.enumerate() if t.name == "unisono-names"])


def unknown_if_invalid(host):
    if host.endswith(".invalid"):
        raise socket.gaierror(socket.EAI_NONAME, "not known")
    return [host]


class Watch:
    """A clock that a test advances; it counts who looks at it."""

    def __init__(self):
        self.time, self.looks = 0.0, 0

    def __call__(self):
        self.looks += 1
        return self.time


@pytest.mark.parametrize("limit", ["0.5", "0"])
def test_a_task_serves_while_there_are_signs_or_without_a_limit(monkeypatch, limit):
    monkeypatch.setenv(CHIEF_VARIABLE, limit)
    served, watch = Served(), Watch()
    served.chief_lease = Lease(watch)
    joined = threading.Thread(target=served.join)
    joined.start()
    for _ in range(4):
        watch.time += 0.4
        looks = watch.looks
        until(lambda: watch.looks > looks or not joined.is_alive())  # noqa: B023 (called at once)
        if limit != "0":
            served.chief_lease.renew()
    assert joined.is_alive()
    served.ended.set()
    joined.join(LIMIT)
    assert served.is_closed


@pytest.fixture
def asked(tuned):
    """Serves in the main thread, which gets SIGTERM; collects what reaches the program's own handler."""
    found = []
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: found.append(number))
    tuned(_serve, _LOOK_EVERY=0.05)
    yield found
    signal.signal(signal.SIGTERM, earlier)


def until(condition):
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def later(*actions):
    """Call functions one after the other, while the main thread serves: it has a handler of its own then."""
    before = signal.getsignal(signal.SIGTERM)

    def act():
        until(lambda: _serve.is_supervised() or signal.getsignal(signal.SIGTERM) != before)
        for action in actions:
            action()

    thread = threading.Thread(target=act)
    thread.start()
    return thread


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_task_that_gets_sigterm_serves_until_the_chief_has_saved(asked, caplog):
    served = Served()
    served.exit_code = 42

    def noted():
        until(lambda: "got SIGTERM" in caplog.text)

    def end():
        assert not served.is_closed
        served.ended.set()

    acting = later(terminate, noted, terminate, end)
    assert served.join() == 42
    acting.join()
    assert (asked, served.is_closed) == ([], True)
    assert caplog.text.count("ps:0 got SIGTERM, and serves until chief:0 ends the job, for 30 s at most") == 1


@pytest.mark.parametrize("why", ["the grace is over", "the chief has vanished"])
def test_a_task_that_gets_sigterm_ends_without_a_word_of_its_chief(asked, monkeypatch, tuned, why):
    if why == "the grace is over":
        monkeypatch.setenv(_serve.GRACE_VARIABLE, "0.3")
    else:
        tuned(_serve, _VANISHED=0.6)
    served = Served()
    acting = later(terminate)
    assert served.join() == 143
    acting.join()
    assert (asked, served.is_closed) == ([signal.SIGTERM], True)


def test_a_launcher_decides_itself_when_a_task_ends(asked, monkeypatch):
    monkeypatch.setenv("UNISONO_LAUNCH", "1")
    served = Served()
    acting = later(terminate, served.ended.set)
    served.join()
    acting.join()
    assert asked == [signal.SIGTERM]


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", ""])
def test_the_limit_must_be_a_number_of_seconds(monkeypatch, text):
    monkeypatch.setenv(CHIEF_VARIABLE, text)
    with pytest.raises(InvalidArgumentError, match="must be a number of seconds"):
        seconds_of(CHIEF_VARIABLE, 1.0)


def test_a_task_that_comes_after_the_end_of_its_job_ends_with_its_code():
    served = Served()
    leave_end_marker(["localhost:1"], 7)
    assert served.join() == 7
    assert served.is_closed


@pytest.mark.parametrize(("log", "has_log"), [(None, True), ("1", True), ("0", False)])
def test_a_servers_log_can_be_turned_off(monkeypatch, tmp_path, log, has_log):
    assert durable_store(0) is None
    monkeypatch.setenv("UNISONO_PS_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("UNISONO_PS_SNAPSHOT_SECONDS", "0.05")
    if log is not None:
        monkeypatch.setenv("UNISONO_PS_LOG", log)
    durable = durable_store(3)
    assert durable.has_log is has_log
    durable.store.raise_generation(4)
    assert ((tmp_path / "ps-3" / "log").exists(), durable._timer is not None) == (has_log, not has_log)
    until(lambda: has_log or durable.snapshot_number == 1)
    durable.close()
    assert (tmp_path / "ps-3").is_dir()
