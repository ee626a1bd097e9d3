"""No byte from outside of a cluster ends a thread or a job: properties of every parser and every port."""

import contextlib
import json
import socket
import struct
import threading
import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from unisono import ClusterError
from unisono.cluster._coordinator_proxy import CoordinatorProxy
from unisono.cluster.liveness._status import WorkerStatus, answer_problem
from unisono.cluster.liveness._status_server import Peers, StatusServer
from unisono.cluster.rendezvous import _protocol as m
from unisono.cluster.rendezvous._client import RendezvousResult, _read_result
from unisono.cluster.rendezvous._server import RendezvousServer

#: JSON may hold half of a surrogate pair, which cannot be encoded, and numbers of thousands of digits.
TEXTS = st.one_of(
    st.text(max_size=20), st.sampled_from(["\ud800", "a\udfff", "\x00", "\u2028", "secret", "x" * 999])
)
NUMBERS = st.one_of(st.integers(), st.just(10**4000), st.just(-(10**40)), st.floats())
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(TEXTS, SCALARS, max_size=3),
    st.just([[{"a": []}]]),
)
KINDS = st.sampled_from(
    ["hello", "start", "roster", "state", "step", "file", "checkpoint_number", "abort", "\ud800"]
)
KEYS = ["process_id", "host", "pid", "token", "config", "secret", "number", "path", "series", "index", "step"]
KEYS += [
    "collectives_begun",
    "text",
    "reason",
    "coordinator",
    "hosts",
    "roster",
    "steps",
    "finished",
    "reached",
]
KEYS += ["done", "in_flight"]
MESSAGES = st.builds(
    lambda kind, rest: {**rest, "kind": kind},
    KINDS,
    st.dictionaries(st.sampled_from(KEYS) | TEXTS, VALUES, max_size=8),
)
GREETINGS = st.fixed_dictionaries(
    {
        "kind": st.just("hello"),
        "process_id": st.integers(-1, 3) | VALUES,
        "host": st.just("h") | VALUES,
        "pid": st.integers() | VALUES,
        "token": st.just("t") | VALUES,
        "config": st.dictionaries(st.sampled_from(["a", "generation"]) | TEXTS, SCALARS, max_size=4) | VALUES,
    }
)


def raw(body, version=m.VERSION, length=None):
    return struct.pack(">4sHI", b"UNIM", version, len(body) if length is None else length) + body


def framed(message):
    return raw(json.dumps(message).encode())


BYTES = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=60).map(raw),
    st.builds(raw, st.binary(max_size=40), st.integers(0, 0xFFFF), st.integers(0, 0xFFFFFFFF)),
    MESSAGES.map(framed),
    GREETINGS.map(framed),
    MESSAGES.map(lambda message: framed({**message, "secret": "secret"})[:-1]),
    st.sampled_from(
        [b"GET / HTTP/1.1\r\n\r\n", b"", raw(b"[" * 100_000), raw(b"1" * 100_000), raw(b"\xff\xfe{")]
    ),
)


@settings(deadline=None)
@given(BYTES)
@example(raw(b'{"kind":"x","secret":"\\ud800"}'))
def test_bytes_are_a_message_or_a_stranger(data):
    inbox = bytearray(data)
    with contextlib.suppress(m.UnknownPeerError):
        while inbox and (message := m.take_frame(inbox)) is not None:
            assert isinstance(message["kind"], str)
            # What is received can be sent again, as a part of another message.
            m.frame(message)


@settings(deadline=None)
@given(st.lists(GREETINGS | MESSAGES, max_size=4))
def test_a_greeting_is_a_member_or_a_stranger(messages):
    own = m.Member(0, "own", 1, "t0", {"a": 1, "generation": 1})
    state = m.open_rendezvous(own, 3, ["127.0.0.1:1"], 60.0, 0.0)
    for message in messages:
        try:
            member = m.read_hello(json.loads(json.dumps(message)), "10.0.0.1")
        except m.UnknownPeerError as problem:
            str(problem).encode()
            continue
        admission = m.admit(state, member)
        state = admission.state
        told = [admission.rejected or "", *admission.evicted.values(), *m.roster(state)]
        if 0 in state.connected:
            told.append(str(m.outcome(state, 0.0)) + str(m.outcome(state, 61.0)))
        # For a log file, and for the others.
        m.frame({"kind": "abort", "reason": "\n".join(told).encode().decode()})


@settings(deadline=None)
@given(st.lists(MESSAGES, max_size=5))
def test_every_question_has_an_answer(questions):
    status = WorkerStatus()
    status.begin_step(("train", ((8,),)))
    status.note_file("a")
    status.note_number("a", 1)
    for question in questions:
        json.loads(m.frame(status.answer(json.loads(json.dumps(question))))[10:])


@settings(deadline=None)
@given(MESSAGES)
def test_an_answer_is_one_or_a_stranger(message):
    for kind in ("state", "abort", "step", "file", "checkpoint_number"):
        assert isinstance(answer_problem(kind, message), str | None)
    with contextlib.suppress(m.UnknownPeerError):
        assert isinstance(_read_result(message, "127.0.0.1"), RendezvousResult)
    with contextlib.suppress(m.UnknownPeerError):
        assert all(isinstance(line, str) for line in m.read_lines(message, "roster"))


def send(port, data, *, read=True):
    """Send bytes in parts, and wait until the port closes the connection, as it may at any byte."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 60) as sock:
        half = len(data) // 2
        sock.sendall(data[:half])
        sock.sendall(data[half:])
        sock.shutdown(socket.SHUT_WR)
        while read and sock.recv(1 << 16):
            continue


SOCKETS = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def presence(caplog):
    one = StatusServer("127.0.0.1", WorkerStatus(), "secret")
    yield one
    one.close()
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


def ask(port, secret="secret"):
    return Peers(0, ("", f"127.0.0.1:{port}"), ("a", "b"), secret, 60.0).ask(1, {"kind": "state"})


@SOCKETS
@given(BYTES)
@example(raw(b'{"kind":"x","secret":"\\ud800"}'))
def test_the_port_of_a_process_goes_on_answering(presence, data):
    send(presence.port, data)
    assert ask(presence.port)["steps"] == 0


def test_the_port_of_a_process_holds_few_connections(presence, monkeypatch):
    monkeypatch.setattr("unisono.cluster.liveness._port_server._CONNECTIONS", 8)
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", presence.port), 60))
            sock.settimeout(60)
            sock.sendall(b"UNIM")
        assert ask(presence.port)["steps"] == 0
        first = stack.enter_context(socket.create_connection(("127.0.0.1", presence.port), 60))
        first.sendall(raw(b"", length=(1 << 16) + 1))
        # Rejected before it is received.
        with contextlib.suppress(ConnectionError):
            assert first.recv(1) == b""


def test_an_answer_that_fails_does_not_end_the_thread(monkeypatch, caplog):
    status = WorkerStatus()
    one = StatusServer("127.0.0.1", status, "secret")
    try:
        answer, failures = status.answer, iter([ValueError("mine")])

        def fail_once(question):
            for error in failures:
                raise error
            return answer(question)

        monkeypatch.setattr(status, "answer", fail_once)
        # Asked again after the first one.
        assert ask(one.port)["steps"] == 0
    finally:
        one.close()
    assert "A question could not be answered" in caplog.text


@SOCKETS
@given(st.lists(BYTES, min_size=1, max_size=4))
def test_process_0_goes_on_waiting(data):
    own = m.Member(0, "own", 1, "t0", {"a": 1})
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    state = m.open_rendezvous(own, 2, [f"127.0.0.1:{port}"], 60.0, time.monotonic())
    found = []

    def run():
        with RendezvousServer(listener, state) as server:
            try:
                found.append(server.run({"coordinator": "", "secret": "s"}))
            except ClusterError as error:
                found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    for one in data:
        send(port, one, read=not one.startswith(b"UNIM"))
    # A stranger that speaks the protocol may take part in the state: no other error ends it.
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 60) as sock:
        sock.sendall(m.frame(m.hello(m.Member(1, "other", 2, "t1", {"a": 1}))))
        sock.settimeout(60)
        while sock.recv(1 << 16):
            continue
    thread.join(60)
    assert not thread.is_alive()
    assert found[0] is None or isinstance(found[0], ClusterError)


def test_a_relay_holds_few_connections(monkeypatch):
    monkeypatch.setattr("unisono.cluster._coordinator_proxy._CONNECTIONS", 4)
    with socket.create_server(("127.0.0.1", 0)) as service, contextlib.ExitStack() as stack:
        relay = CoordinatorProxy(f"127.0.0.1:{service.getsockname()[1]}", "secret")
        host, _, port = relay.address.rpartition(":")
        before = threading.active_count()
        crowd = [stack.enter_context(socket.create_connection((host, int(port)), 60)) for _ in range(20)]
        for sock in crowd[4:]:
            assert sock.recv(1) == b""
        assert threading.active_count() <= before + 8
        # One that ends makes room.
        for sock in crowd[:4]:
            service.accept()[0].close()
            sock.close()
        until = time.monotonic() + 60
        while True:
            with socket.create_connection((host, int(port)), 60) as sock:
                sock.settimeout(0.2)
                try:
                    assert sock.recv(1) == b"", "nothing is said"
                except TimeoutError:
                    break
            assert time.monotonic() < until
        relay.close()
