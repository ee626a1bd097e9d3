"""Which thread takes what arrives: the one that waits, else that of the clients; deadlines hold in both."""

import os
import select
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from unisono.cluster_resolver._spec import Task
from unisono.rpc._calls import PeerLostError
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.rpc._transport import _client_thread
from unisono.rpc._transport import _shared_memory as shared
from unisono.rpc._transport._channel_events import ChannelEvents
from unisono.rpc._transport._client import RpcClient
from unisono.rpc._transport._server import RpcServer

LONG = 30.0

pytestmark = pytest.mark.skipif(not shared.IS_AVAILABLE, reason="the system has no direct connections")


@pytest.fixture
def events():
    made = ChannelEvents()
    yield made
    if not made._is_closed:
        made.close()


@pytest.fixture
def worker():
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def is_ready(events):
    """Whether the poller of the clients' thread would wake up."""
    return bool(select.select([events.descriptor], [], [], 0)[0])


def wait_for(condition):
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_what_arrives_is_taken_by_the_thread_that_waits(events, worker, pair):
    here, there = pair
    done, threads = Future(), []

    def action():
        threads.append(threading.get_ident())
        assert events.is_mine
        done.set_result(here.recv(10))

    events.watch(here.fileno(), action)
    waiting = worker.submit(events.take_until, done, LONG)
    wait_for(lambda: events._taker is not None)
    there.send(b"x")
    waiting.result(LONG)
    assert done.result(0) == b"x"
    assert threads != [threading.get_ident()]
    # Nobody waits now: the next message is for the clients' thread.
    assert not is_ready(events)
    done = Future()
    there.send(b"y")
    assert is_ready(events)
    events._actions[here.fileno()] = lambda: done.set_result(here.recv(10))
    events.receive()
    assert done.result(0) == b"y"
    assert not is_ready(events)
    assert not events.is_mine


def test_the_thread_of_the_peers_sleeps_while_another_one_waits(events, worker, pair):
    here, there = pair
    done, seen = Future(), []

    def action():
        # The message has arrived, and is not read yet.
        seen.append(is_ready(events))
        events.receive()
        done.set_result(here.recv(10))

    events.watch(here.fileno(), action)
    waiting = worker.submit(events.take_until, done, LONG)
    wait_for(lambda: events._taker is not None)
    there.send(b"x")
    waiting.result(LONG)
    assert seen == [False]


def test_a_future_that_fails_elsewhere_ends_the_wait(events, worker):
    done = Future()
    waiting = worker.submit(events.take_until, done)
    wait_for(lambda: events._taker is not None)
    done.set_exception(PeerLostError("late", Task("ps", 0), "", 1.0))
    waiting.result(LONG)
    assert not events._turn.locked()


def test_one_thread_takes_and_others_return(events, worker):
    first, second = Future(), Future()
    waiting = worker.submit(events.take_until, first)
    wait_for(lambda: events._taker is not None)
    worker.submit(events.take_until, second).result(LONG)
    assert not second.done()
    first.set_result(None)
    waiting.result(LONG)


def test_the_main_thread_takes_nothing(events):
    # It could be interrupted between two lines of what it takes.
    events.take_until(Future(), LONG)
    assert not events._turn.locked()


def test_an_action_that_fails_is_told_and_ends_no_wait(events, worker, pair, caplog):
    here, there = pair
    done = Future()

    def action():
        if here.recv(1) == b"x":
            raise KeyError("w")
        done.set_result(None)

    events.watch(here.fileno(), action)
    waiting = worker.submit(events.take_until, done, LONG)
    there.send(b"xy")
    waiting.result(LONG)
    assert done.done()
    assert "could not be handled" in caplog.text


def test_a_wait_has_a_limit_and_ends_when_the_connections_do(events, worker):
    worker.submit(events.take_until, Future(), 0.01).result(LONG)
    waiting = worker.submit(events.take_until, Future())
    wait_for(lambda: events._taker is not None)
    before = len(os.listdir("/proc/self/fd"))
    events.close()
    waiting.result(LONG)
    assert len(os.listdir("/proc/self/fd")) == before - 3
    events._ring(Future())


def test_room_to_send_is_told_where_it_is_wanted(events, pair):
    here, _ = pair
    ready = []
    events.watch(here.fileno(), lambda: ready.append(1))
    events.receive()
    assert ready == []
    events.watch_room(here.fileno(), True)
    events.receive()
    events.watch_room(here.fileno(), False)
    events.receive()
    events.unwatch(here.fileno())
    events.unwatch(here.fileno())
    # One that has failed is still given messages, until the clients' thread ends it.
    events.watch_room(here.fileno(), True)
    events.receive()
    assert ready == [1]


class _DoneMeanwhile(Future):
    """A future that another thread completes just after it was asked whether it is done."""

    def __init__(self, completes):
        super().__init__()
        self._completes, self.asked = completes, 0

    def done(self):
        was_done = super().done()
        self.asked += 1
        if self.asked == self._completes:
            with ThreadPoolExecutor(1) as other:
                other.submit(self.set_result, None).result(LONG)
        return was_done


@pytest.mark.parametrize("asked", [1, 2])
def test_an_answer_between_the_look_and_the_wait_ends_the_wait(events, worker, asked):
    """At first no thread takes what arrives, then this one does and is about to sleep."""
    future = _DoneMeanwhile(asked)
    worker.submit(events.take_until, future).result(LONG)
    assert future.result(0) is None
    assert not events._turn.locked()


def test_what_arrives_as_a_wait_ends_is_left_for_the_thread_of_the_peers(events, worker, pair):
    here, there = pair
    done, other = Future(), Future()

    def action():
        here.recv(1)
        # In the thread that waited; the second byte is there, and no event follows for it.
        (done if not done.done() else other).set_result(None)

    there.send(b"xy")
    events.watch(here.fileno(), action)
    worker.submit(events.take_until, done).result(LONG)
    assert not other.done()
    assert is_ready(events)
    events.receive()
    assert other.done()


def test_a_forked_process_leaves_the_pollers_to_its_parent(worker, monkeypatch):
    made = _client_thread.ClientThread()
    channels = made.channels
    for name in ("_THREAD", "_GUARD"):
        monkeypatch.setattr(_client_thread, name, made if name == "_THREAD" else threading.Lock())
    _client_thread._forget_thread()
    worker.submit(made.take_until, Future()).result(LONG)
    assert _client_thread._THREAD is None
    channels.close()
    made.mailbox.close()
    made.context.term()


def test_a_worker_takes_its_answers_and_deadlines_hold(worker):
    """The callbacks of an answer run in the thread that waits for it; one without an answer fails in time."""
    released = threading.Event()

    def handler(client, request):
        if request.op is Op.PUSH:
            released.wait(LONG)
        elif request.arrays:
            # An answer that arrives before its request waits is for the client's own thread.
            wait_for(lambda: rpc_client._thread.channels._taker is not None)
        return request.answer(Op.OK, {}, list(request.arrays))

    rpc_server = RpcServer("127.0.0.1:0", handler)
    rpc_server.start()
    rpc_client = RpcClient(Task("ps", 0), rpc_server.address)
    array, ran_in = np.arange(100_000.0), []

    def waits(number):
        sent = rpc_client.send(Frame(Op.PULL, number, arrays=[array]), LONG)
        sent.add_done_callback(lambda done: ran_in.append(threading.get_ident()))
        wait_for(lambda: rpc_client._thread.channels._taker is None)
        rpc_client.take_until(sent, LONG)
        np.testing.assert_array_equal(sent.result(LONG).arrays[0], array)
        return threading.get_ident()

    try:
        rpc_client.call(Frame(Op.STATUS, 1), LONG)
        found = [worker.submit(waits, 2 + i).result(LONG) for i in range(20)]
        assert sum(a == b for a, b in zip(found, ran_in, strict=True)) > 0
        late = worker.submit(rpc_client.call, Frame(Op.PUSH, 100), 0.2)
        with pytest.raises(PeerLostError, match="no answer from"):
            late.result(LONG)
        # What waits when the client is closed fails at once.
        last = worker.submit(rpc_client.call, Frame(Op.PULL, 101), LONG)
        wait_for(lambda: rpc_client._thread.channels._taker is not None)
        rpc_client.close()
        with pytest.raises(PeerLostError):
            last.result(LONG)
    finally:
        released.set()
        rpc_client.close()
        rpc_server.close()


def test_many_threads_share_the_connections_and_each_has_its_own_answer():
    """Those who wait take turns; answers are small, larger than the buffer, and in shared memory."""
    rpc_server = RpcServer("127.0.0.1:0", lambda client, request: request.answer(Op.OK, {}, request.arrays))
    rpc_server.start()
    rpc_clients = [RpcClient(Task("ps", i), rpc_server.address) for i in range(2)]

    def asks(number):
        kept = []
        for i in range(25):
            request = 1 + 1000 * number + i
            arrays = [np.full(size, request) for size in (3, 3000, 9000)[: 1 + i % 3]] * 8
            kept.append((request, rpc_clients[i % 2].call(Frame(Op.PULL, request, arrays=arrays), LONG)))
        # Later answers have not been written over earlier ones.
        for request, answer in kept:
            assert answer.request == request
            assert all((array == request).all() for array in answer.arrays)
        return len(kept)

    try:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(asks, range(4))) == [25] * 4
    finally:
        for rpc_client in rpc_clients:
            rpc_client.close()
        rpc_server.close()


def test_the_last_peer_may_be_closed_by_an_answer(worker, monkeypatch):
    """In the thread that takes the answer, for which the end of the clients' thread waits."""
    released, joins = threading.Event(), []

    def handler(client, request):
        released.wait(LONG)
        return request.answer(Op.OK)

    rpc_server = RpcServer("127.0.0.1:0", handler)
    rpc_server.start()
    rpc_client = RpcClient(Task("ps", 0), rpc_server.address)
    thread, closed_in = rpc_client._thread, []
    monkeypatch.setattr(thread, "join", lambda seconds: joins.append(seconds))

    def close(done):
        closed_in.append(threading.get_ident())
        rpc_client.close()

    def waits():
        sent = rpc_client.send(Frame(Op.PULL, 1), LONG)
        sent.add_done_callback(close)
        wait_for(lambda: not thread.channels._turn.locked())
        rpc_client.take_until(sent, LONG)
        return threading.get_ident()

    try:
        waiting = worker.submit(waits)
        wait_for(lambda: thread.channels._taker is not None)
        wait_for(lambda: rpc_client._link._channel is not None)
        released.set()
        assert closed_in == [waiting.result(LONG)]
        wait_for(lambda: not thread.is_alive())
        assert joins == []
    finally:
        released.set()
        rpc_server.close()
