"""The peer monitor and its status servers: those of several processes in one process."""

import concurrent.futures
import contextlib
import errno
import os
import resource
import socket
import threading
import time

import jax
import numpy as np
import pytest

from unisono import ClusterError
from unisono.cluster.liveness import _port_server, _status_server
from unisono.cluster.liveness._peer_monitor import PeerMonitor
from unisono.cluster.liveness._status import WorkerStatus, describe_step
from unisono.cluster.liveness._status_server import (
    AbsentError,
    EndedError,
    Peers,
    StatusServer,
    UnreachableError,
    own_ip,
)
from unisono.cluster.rendezvous._protocol import frame, take_frame

GLOO = "UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:4711"


def gloo_error():
    return jax.errors.JaxRuntimeError(GLOO)


# --- ports


class Cluster:
    """Several attendances in one process."""

    def __init__(self, count, limit=60.0, patience=60.0):
        self.statuses = [WorkerStatus() for _ in range(count)]
        self.ports = [StatusServer("127.0.0.1", status, "secret") for status in self.statuses]
        addresses = tuple(f"127.0.0.1:{port.port}" for port in self.ports)
        names = tuple(f"worker {i}" for i in range(count))
        self.peers = [Peers(i, addresses, names, "secret", patience) for i in range(count)]
        self.members = [PeerMonitor(r, p, limit) for r, p in zip(self.statuses, self.peers, strict=True)]

    def take(self, *shapes, kind="train"):
        """What each worker is told when all take their batches at once."""

        def one(member, shape):
            try:
                member.begin_step(kind, [] if shape is None else [np.zeros(shape)])
            except ClusterError as error:
                return str(error)
            return None

        with concurrent.futures.ThreadPoolExecutor(len(shapes)) as pool:
            return list(pool.map(one, self.members, shapes))


@pytest.fixture
def cluster():
    made = []

    def make(count, **options):
        made.append(Cluster(count, **options))
        return made[-1]

    yield make
    for one in made:
        for port in one.ports:
            port.close()


def test_all_are_asked_at_once(cluster):
    two = cluster(3)
    two.statuses[2].begin_step(("train", None))
    found = two.peers[0].ask_all({"kind": "state"}, [1, 2])
    assert [found[1]["steps"], found[2]["steps"]] == [0, 1]
    two.ports[1].close()
    assert isinstance(two.peers[0].ask_all({"kind": "state"}, [1, 2])[1], EndedError)


def test_the_first_process_numbers_checkpoints(cluster):
    two = cluster(2)
    first, second = two.members
    assert [first.agree_on_number("a", number, is_first=True) for number in (7, 9)] == [7, 9]
    assert [second.agree_on_number("a", number, is_first=False) for number in (1, 2)] == [7, 9]
    # It goes on without a third, and so does this one.
    two.statuses[0].begin_step(("train", None))
    assert second.agree_on_number("a", 3, is_first=False) == 3


def test_a_first_process_that_has_ended_numbers_nothing(cluster, caplog):
    two = cluster(2)
    two.ports[0].close()
    assert two.members[1].agree_on_number("a", 3, is_first=False) == 3
    assert "The first worker may not have numbered checkpoint 0 of a" in caplog.text


def test_strangers_are_not_answered(cluster):
    two = cluster(2)
    stranger = Peers(0, two.peers[0].addresses, ("a", "b"), "guess", 0.3)
    with pytest.raises(AbsentError):
        stranger.ask(1, {"kind": "state"})
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", frame({"kind": "state", "secret": "é"})):
        with socket.create_connection(("127.0.0.1", two.ports[1].port)) as sock:
            sock.sendall(nonsense)
            assert sock.recv(10) == b""
    assert two.peers[0].ask(1, {"kind": "state"})["steps"] == 0


def test_a_closed_connection_is_not_an_end(cluster):
    """Only a refused connection is: what was lost is asked again."""
    two = cluster(2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def close_then_answer():
            for _ in range(3):
                listener.accept()[0].close()
            sock, _ = listener.accept()
            with sock:
                sock.recv(1 << 16)
                sock.sendall(frame(two.statuses[1].answer({"kind": "state"})))

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            served = pool.submit(close_then_answer)
            asked = Peers(0, ("", address), ("a", "b"), "s", 60.0).ask(1, {"kind": "state"})
            served.result(60)
    assert asked == two.statuses[1].answer({"kind": "state"})


def read_all(sock):
    """What arrives until the other end closes, read slowly enough for its buffer to fill up."""
    got = bytearray()
    while data := sock.recv(1 << 14):
        got += data
        time.sleep(0.0005)
    return got


def test_an_answer_that_is_larger_than_the_buffers_arrives_whole(cluster):
    two = cluster(2)
    shapes = tuple((i, 2, 3) for i in range(40_000))
    two.statuses[1].begin_step(("train", shapes))
    # Connections that it accepts have the same.
    two.ports[1]._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    with socket.socket() as sock:
        # Before it connects, or the window is larger than that.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        sock.connect(("127.0.0.1", two.ports[1].port))
        sock.settimeout(30)
        sock.sendall(frame({"kind": "state", "secret": "secret"}))
        got = take_frame(read_all(sock))
    assert got["step"] == describe_step(("train", shapes))
    assert two.peers[0].ask(1, {"kind": "state"})["steps"] == 1


def test_a_peer_that_reads_nothing_holds_up_nothing(cluster, monkeypatch):
    monkeypatch.setattr(_port_server, "_SECONDS", 0.5)
    two = cluster(2)
    two.statuses[1].begin_step(("train", tuple((i, 2, 3) for i in range(40_000))))
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            sock.connect(("127.0.0.1", two.ports[1].port))
            sock.sendall(frame({"kind": "state", "secret": "secret"}))
        assert two.peers[0].ask(1, {"kind": "file", "path": "a", "collectives_begun": 0})["done"] is True
        deadline = time.monotonic() + 30
        while len(two.ports[1]._selector.get_map()) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(two.ports[1]._selector.get_map()) == 1


def test_a_question_that_is_larger_than_the_buffers_arrives_whole(monkeypatch):
    class SmallSocket(socket.socket):
        def connect_ex(self, address):
            self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
            return super().connect_ex(address)

    monkeypatch.setattr("unisono.cluster.liveness._status_server.socket.socket", SmallSocket)
    asked, answer = {"kind": "state", "reason": "x" * 700_000}, WorkerStatus().answer({"kind": "state"})
    with socket.create_server(("127.0.0.1", 0)) as listener, concurrent.futures.ThreadPoolExecutor(1) as pool:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)

        def serve():
            with listener.accept()[0] as sock:
                sock.settimeout(30)
                inbox = bytearray()
                while (message := take_frame(inbox, 1 << 24)) is None:
                    inbox += sock.recv(1 << 16)
                sock.sendall(frame(answer))
                return message

        served = pool.submit(serve)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert Peers(0, ("", address), ("a", "b"), "s", 30.0).ask(1, asked) == answer
        assert served.result(30) == {**asked, "secret": "s"}


@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", frame({"kind": "state"}), frame({"kind": "\ud800"})]
)
def test_another_program_at_the_port_of_a_process(said):
    with socket.create_server(("127.0.0.1", 0)) as listener, concurrent.futures.ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as sock:
                        sock.sendall(said)

        pool.submit(serve)
        try:
            with pytest.raises(AbsentError, match="it accepts connections but does not answer") as info:
                Peers(0, ("", address), ("a", "b"), "s", 0.8).ask(1, {"kind": "state"})
        finally:
            listener.shutdown(socket.SHUT_RDWR)
    assert not isinstance(info.value, EndedError)


def test_a_connection_to_itself_is_nobody(monkeypatch):
    """A system may give a connection to a free port that very port: then it receives its own question."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        address = own.getsockname()
        monkeypatch.setattr("unisono.cluster.liveness._status_server.socket.socket", lambda *_: own)
        peers = Peers(0, ("", f"{address[0]}:{address[1]}"), ("a", "b"), "s", 60.0)
        assert isinstance(peers.ask_all({"kind": "state"}, [1])[1], EndedError)


def test_a_process_without_descriptors_reports_its_peers_as_absent(cluster):
    """No error of another kind, which would end the watchdog's thread; it asks again later."""
    two = cluster(2, patience=0.2)
    lowest = os.dup(0)
    os.close(lowest)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        absent = two.members[0].find_absent()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "no connection can be opened to it (too many open files)" in str(absent[1])
    assert two.members[0].find_absent() == {}


def test_one_that_listens_and_says_nothing_is_stopped():
    """The kernel accepts connections for a process that was stopped."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(AbsentError, match=r"did not answer within 0.2 s") as info:
            Peers(0, ("", address), ("a", "b"), "s", 0.2).ask(1, {"kind": "state"})
    assert not isinstance(info.value, EndedError)


def test_who_does_not_run_while_it_asks_takes_no_machine_for_gone(monkeypatch):
    """The connection is there when this process goes on, and the time is over."""
    connect = _status_server._PeerRequest.connect
    monkeypatch.setattr(
        _status_server._PeerRequest, "connect", lambda self, at: connect(self, at) or time.sleep(0.3)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(AbsentError, match="its process is stopped") as info:
            Peers(0, ("", address), ("a", "b"), "s", 0.2).ask(1, {"kind": "state"})
    assert not isinstance(info.value, UnreachableError)


def test_the_own_address_is_that_of_the_way_to_the_other():
    assert own_ip("127.0.0.1:4711") == "127.0.0.1"


# --- what follows


def test_equal_batches_are_taken(cluster):
    three = cluster(3)
    for shape in ((8, 2), (8, 2), (5, 2), None):
        assert three.take(shape, shape, shape) == [None] * 3


def test_only_a_new_shape_is_asked_about(cluster):
    two = cluster(2)
    two.take((8, 2), (8, 2))
    for port in two.ports:
        port.close()
    assert two.take((8, 2), (8, 2)) == [None, None]


@pytest.mark.parametrize(
    "shapes", [((8,), (8,), (6,)), ((6,), (8,), (8,)), ((8,), (8,), None), ((1,), (2,), (3,))]
)
def test_unequal_batches_end_all(cluster, shapes):
    three = cluster(3)
    three.take((8,), (8,), (8,))
    found = three.take(*shapes)
    assert any(found)
    # Who did not look hears of it at the next batch, or from the error of its collective.
    for member, text in zip(three.members, found, strict=True):
        told = text or str(member.explain(gloo_error()))
        assert told.startswith("All workers must take the same steps, on batches of the same shapes.")
        assert "Received: step 2 is 'train" in told
        # One that was slow may not have come to this batch when it was asked.
        assert ", but 'train" in told


def test_a_worker_that_is_silent_after_its_answer_is_compared_by_that_answer(cluster, monkeypatch):
    two = cluster(2)
    two.statuses[1].begin_step(("train", ((6,),)))
    real, asked = Peers.ask_all, []

    def ask_all(peers, question, others):
        asked.append(question)
        return real(peers, question, others) if len(asked) == 1 else {1: UnreachableError()}

    monkeypatch.setattr(Peers, "ask_all", ask_all)
    with pytest.raises(ClusterError, match=r"Received: step 1 is 'train on \(8,\)'.*, but 'train on \(6,\)'"):
        two.members[0].begin_step("train", [np.zeros(8)])


def test_a_batch_waits_for_the_other_worker(cluster):
    two = cluster(2)
    first = threading.Thread(target=two.members[0].begin_step, args=("train", [np.zeros(3)]))
    first.start()
    assert first.is_alive()
    two.members[1].begin_step("train", [np.zeros(3)])
    first.join(60)
    assert not first.is_alive()


def test_a_worker_that_does_not_come_is_named_with_what_it_did_last(cluster):
    two = cluster(2, limit=0.2)
    two.statuses[1].begin_step(("test", ((4,),)))
    two.statuses[1].begin_step(("test", ((4,),)))
    two.members[0].status.steps = 2
    with pytest.raises(
        ClusterError,
        match=r"worker 0 of 2 timed out waiting for its peers \(3 steps begun, the last one train on "
        r"\(3,\)\)\. Peers report: worker 1: 2 steps begun, the last one test on \(4,\)",
    ):
        two.members[0].begin_step("train", [np.zeros(3)])


def test_a_worker_that_has_ended_is_named(cluster):
    three = cluster(3)
    three.ports[2].close()
    told = [str(three.members[i].explain(gloo_error())) for i in range(2)]
    # The first to notice tells the other.
    assert all("Received: worker 0 of 3 lost worker 2: its process has ended." in text for text in told)
    assert all(text.endswith(f"The error on this worker: {GLOO}") for text in told)
    with pytest.raises(ClusterError, match="lost worker 2"):
        three.members[1].begin_step("train", [np.zeros(3)])


def test_the_next_worker_has_ended(cluster):
    two = cluster(2)
    two.ports[1].close()
    with pytest.raises(ClusterError, match=r"worker 0 of 2 lost worker 1: its process has ended\. The log"):
        two.members[0].begin_step("train", [np.zeros(3)])


def chained(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("my own"),
        ValueError("collective"),
        RuntimeError("Connection reset by peer"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"),
        ClusterError("Gloo"),
        chained(RuntimeError("mine"), chained(ClusterError("explained"), gloo_error())),
    ],
)
def test_other_errors_are_left_alone(cluster, error):
    two = cluster(2)
    assert two.members[0].explain(error) is None
    assert not two.members[0].is_aborted


@pytest.mark.parametrize("error", [ValueError(GLOO), chained(RuntimeError("deleted"), gloo_error())])
def test_errors_of_others_are_found(cluster, error):
    two = cluster(2)
    assert "worker 1: 0 steps begun" in str(two.members[0].explain(error))
    assert two.members[1].is_aborted


def test_leaving_waits_for_all(cluster):
    two = cluster(2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda m: m.wait_for_shutdown(60.0), two.members)) == [None, None]


@pytest.mark.parametrize(
    ("ended", "text"), [(True, "its process has ended"), (False, "did not answer within 0.1 s")]
)
def test_leaving_without_somebody(cluster, ended, text):
    two = cluster(2, patience=60.0 if ended else 0.1)
    two.ports[1].close()
    with contextlib.ExitStack() as stack:
        if not ended:  # stopped: the kernel accepts connections for it
            port = int(two.peers[0].addresses[1].rpartition(":")[2])
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        assert text in two.members[0].wait_for_shutdown(60.0 if ended else 0.1)


def test_leaving_says_on_all_what_the_first_process_has_found(cluster):
    """The others ask the first one alone."""
    three = cluster(3)
    three.ports[2].close()
    # As its wait says: on a busy machine the first one asks before that has begun.
    three.statuses[1].is_finished = True
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda m: m.wait_for_shutdown(60.0), three.members[:2]))
    assert texts == ["worker 2: its process has ended"] * 2
    # One that comes later, when the first process has ended, knows it, too.
    three.ports[0].close()
    assert three.members[1].wait_for_shutdown(60.0) == texts[0]


class FlakyPeers:
    """The peers, of which questions of one kind are lost at first."""

    def __init__(self, peers, kind, lost):
        self._peers, self._kind, self.lost = peers, kind, lost

    def __getattr__(self, name):
        return getattr(self._peers, name)

    def ask_all(self, question, processes):
        if question["kind"] != self._kind or not self.lost:
            return self._peers.ask_all(question, processes)
        self.lost -= 1
        return {p: UnreachableError("its machine cannot be reached") for p in processes}

    def ask(self, process, question):
        answer = self.ask_all(question, [process])[process]
        if isinstance(answer, AbsentError):
            raise answer
        return answer


def test_the_end_is_sent_again_to_whom_it_has_not_reached(cluster):
    """Otherwise whoever is cut off for a moment takes the end of the first process for a failure."""
    two = cluster(2)
    two.members[0]._peers = FlakyPeers(two.peers[0], "end", 1)
    two.statuses[1].is_finished = True
    assert two.members[0].wait_for_shutdown(60.0) is None
    assert two.statuses[1].end == ""


def test_a_wait_for_the_next_process_is_watched_and_ends_with_the_job(cluster):
    """As a collective is: a machine that is lost meanwhile is found long before the limit."""
    two = cluster(2)
    first = two.members[0]
    flaky = first._peers = FlakyPeers(two.peers[0], "step", 1 << 30)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        begun = pool.submit(first.begin_step, "train", [np.zeros(8)])
        try:
            until = time.monotonic() + 30
            while first.status.in_flight.oldest is None and time.monotonic() < until and not begun.done():
                time.sleep(0.001)
            assert first.status.in_flight.oldest is not None
            first.status.answer({"kind": "abort", "reason": "worker 1 is lost"})
            with pytest.raises(ClusterError, match="worker 1 is lost"):
                begun.result(30)
        finally:
            flaky.lost = 0
            two.statuses[1].begin_step(("train", ((8,),)))
    assert first.status.in_flight.oldest is None


def test_leaving_waits_for_one_that_runs(cluster, caplog):
    """The first worker may be writing a model, for longer than `Timeouts.shutdown`."""
    two = cluster(2)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        left = pool.submit(two.members[0].wait_for_shutdown, 0.05)
        while "end of its program and waits for" not in caplog.text:
            assert not left.done()
            time.sleep(0.01)
        two.statuses[1].is_finished = True
        assert left.result(60) is None
    assert not two.members[0].is_aborted
    assert "worker 1: 0 steps begun" in caplog.text


def test_leaving_ends_all_where_another_waits_for_this_process(cluster):
    """A loop whose data end early: both would wait for ever."""
    two = cluster(2)
    two.take((8,), (8,))
    two.statuses[1].begin_step(("train", ((8,),)))
    with two.statuses[1].in_flight.collective():
        assert two.members[0].wait_for_shutdown(60.0) is None
    assert [status.abort_reason for status in two.statuses] == [
        "All workers must take the same steps until their programs end. Received: worker 0 of 2 has reached "
        "the end of its program after 1 steps; worker 1: 2 steps begun, the last one train on (8,). Give "
        "every worker the same number of batches, leave a loop after the same step on every worker, and call "
        "`evaluate` and the like on every worker, not on the chief alone."
    ] * 2


def test_leaving_waits_for_steps_that_both_have_begun(cluster, monkeypatch):
    monkeypatch.setattr("unisono.cluster.liveness._peer_monitor._STUCK", 0.05)
    two = cluster(2)
    two.take((8,), (8,))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with two.statuses[1].in_flight.collective():
            left = pool.submit(two.members[0].wait_for_shutdown, 60.0)
            with pytest.raises(concurrent.futures.TimeoutError):
                left.result(0.5)
        two.statuses[1].is_finished = True
        assert left.result(60) is None


def test_a_new_step_is_not_waited_for_where_another_has_come_to_its_end(cluster):
    two = cluster(2)
    two.statuses[1].is_finished = True
    with pytest.raises(
        ClusterError,
        match=r"Received: worker 0 of 2 begins step 1, train on \(3,\); worker 1 has reached the end of its "
        r"program after 0 steps\. Give every worker the same number",
    ):
        two.members[0].begin_step("train", [np.zeros(3)])
    assert two.members[1].is_aborted


@pytest.mark.parametrize("other", ["step", "end"])
def test_a_call_on_the_chief_alone_is_an_error_at_once(cluster, other):
    two = cluster(2)
    if other == "step":
        two.statuses[1].begin_step(("train", ((8,),)))
    else:
        two.statuses[1].is_finished = True
    with pytest.raises(ClusterError, match=r"a call of `evaluate`.*on every worker, not on the chief alone"):
        two.members[0].begin(("a call of `evaluate`", ()))


@pytest.mark.parametrize("other", ["step", "call", "end"])
def test_a_read_on_the_chief_alone_is_an_error_at_once(cluster, other):
    two = cluster(2)
    if other == "end":
        two.statuses[1].is_finished = True
    else:
        two.statuses[1].begin_step(("train", ((8,),)) if other == "step" else ("a call of `fit`", ()))
    with pytest.raises(ClusterError, match=r"variables that lie in parts together.*not on the chief alone"):
        two.members[0].begin(("a read of variables in parts", ()))


def test_calls_that_differ_are_compared_with_their_arguments_later(cluster):
    two = cluster(2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(m.begin, (f"a call of `{n}`", ()))
            for m, n in zip(two.members, ("fit", "predict"), strict=True)
        ]
        assert [call.result(60) for call in calls] == [None, None]
    assert not any(member.is_aborted for member in two.members)


def test_a_file_is_waited_for_until_it_is_there(cluster):
    two = cluster(2)
    waiting = threading.Thread(target=two.members[1].wait_for_file, args=("m.keras",))
    waiting.start()
    assert waiting.is_alive()
    two.statuses[0].note_file("m.keras")
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_file_that_the_first_worker_does_not_write_is_not_waited_for(cluster, caplog):
    """As in TensorFlow's tutorial, where the others write to places of their own."""
    two = cluster(2)
    two.statuses[0].note_file("chief/m.keras")
    two.statuses[0].collectives_begun += 1
    two.members[1].wait_for_file("worker-1/m.keras")
    assert not caplog.records
    two.ports[0].close()
    two.statuses[1].collectives_begun += 1
    two.members[1].wait_for_file("m.keras")
    assert "may not have written m.keras: its process has ended" in caplog.text


def test_a_host_to_which_there_is_no_route_is_unreachable_at_once(monkeypatch):
    """As where the cable of this host's interface is out: the kernel refuses before it has sent anything."""

    class WithoutRoute(socket.socket):
        def connect_ex(self, address):
            return errno.ENETUNREACH

    monkeypatch.setattr(_status_server.socket, "socket", WithoutRoute)
    with pytest.raises(UnreachableError, match=r"its machine cannot be reached \(network is unreachable"):
        Peers(0, ("", "192.0.2.1:4711"), ("here", "there"), "secret", 600.0).ask(1, {"kind": "state"})
