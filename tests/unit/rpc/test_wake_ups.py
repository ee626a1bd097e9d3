"""How often the threads of the transport wake up: a thread that polls for nothing takes a processor."""

import collections
import errno
import select
import threading
import time

import numpy as np
import pytest
import zmq

from unisono.cluster_resolver._spec import Task
from unisono.rpc._calls import PeerLostError
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.rpc._transport import _local_channel, _server, _sockets
from unisono.rpc._transport import _shared_memory as shared
from unisono.rpc._transport._client import RpcClient
from unisono.rpc._transport._server import RpcServer
from unisono.rpc._transport._sockets import Mailbox

PS = Task("ps", 0)
LONG = 30.0
#: Seconds for which wake-ups are counted, and the most that are none: a thread that spins has thousands.
WATCHED, FEW = 0.4, 20


@pytest.fixture
def polls(monkeypatch):
    """The number of polls of each thread."""
    counts = collections.Counter()
    poll = zmq.Poller.poll

    def counted(self, timeout=None):
        counts[threading.current_thread().name] += 1
        return poll(self, timeout)

    monkeypatch.setattr(zmq.Poller, "poll", counted)
    return counts


def most(polls, seconds=WATCHED):
    """The most polls of a thread in some time."""
    polls.clear()
    time.sleep(seconds)
    return max(polls.values(), default=0)


@pytest.fixture
def busy_server():
    """A server whose handler works until it is released, at a request PUSH."""
    released = threading.Event()

    def handler(client, request):
        if request.op is Op.PUSH:
            released.wait(LONG)
        return request.answer(Op.OK, {}, list(request.arrays))

    rpc_server = RpcServer("127.0.0.1:0", handler)
    rpc_server.start()
    yield rpc_server, released
    released.set()
    rpc_server.close()


def test_a_signal_that_comes_after_its_function_was_called_is_taken():
    mailbox, called, late = Mailbox(), [], []

    class Slow:
        send = staticmethod(late.append)

        def __init__(self, writer):
            self.writer = writer

        def close(self):
            self.writer.close()

    mailbox._writer = Slow(mailbox._writer)
    mailbox.put(lambda: called.append(1))
    # The thread wakes up for something else, between the flag and the byte.
    mailbox.run()
    assert called == [1]
    mailbox._writer.writer.send(late.pop())
    mailbox.run()
    assert select.select([mailbox.descriptor], [], [], 0)[0] == []
    mailbox.put(lambda: called.append(2))
    mailbox._writer.writer.send(late.pop())
    assert select.select([mailbox.descriptor], [], [], 0)[0], "the next one wakes the thread again"
    mailbox.run()
    assert called == [1, 2]
    mailbox.close()


def test_threads_with_nothing_to_do_sleep(busy_server, polls):
    rpc_server, _ = busy_server
    rpc_client = RpcClient(PS, rpc_server.address)
    try:
        array = np.ones(100_000)
        for i in range(20):
            rpc_client.call(Frame(Op.PULL, i, arrays=[array]), LONG)
        # Signals that were late, as above: the thread must not wake up for them again and again.
        for mailbox in (rpc_server._mailbox, rpc_client._thread.mailbox):
            mailbox._writer.send(b"x")
        assert most(polls) <= FEW
    finally:
        rpc_client.close()


@pytest.mark.skipif(not shared.IS_AVAILABLE, reason="the system has no sealed files in memory")
def test_a_sender_sleeps_while_its_receiver_takes_nothing(busy_server, polls, tuned):
    # All of the message goes through the socket, and much more than its buffers hold.
    tuned(_local_channel, SHARED_FROM=1 << 40)
    rpc_server, released = busy_server
    rpc_client = RpcClient(PS, rpc_server.address)
    try:
        rpc_client.call(Frame(Op.PULL, 1), LONG)
        first = rpc_client.send(Frame(Op.PUSH, 2), LONG)
        array = np.arange(8 << 20, dtype=np.float32)
        second = rpc_client.send(Frame(Op.PULL, 3, arrays=[array]), LONG)
        deadline = time.monotonic() + LONG
        while rpc_client._link._channel.waiting <= 1 << 20:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert most(polls) <= FEW
        released.set()
        assert first.result(LONG).op is Op.OK
        np.testing.assert_array_equal(second.result(LONG).arrays[0], array)
        assert rpc_client._link._channel.waiting == 0
        # Neither end polls for room in its socket any more.
        assert most(polls) <= FEW
    finally:
        rpc_client.close()


@pytest.mark.skipif(not shared.IS_AVAILABLE, reason="the system has no sealed files in memory")
def test_an_endpoint_that_can_open_no_files_sleeps_and_takes_connections_later(
    busy_server, polls, tuned, caplog
):
    rpc_server, _ = busy_server
    tuned(_server, _PAUSE_MS=100)
    listening = rpc_server._channels._listener._socket

    class Full:
        close = staticmethod(listening.close)

        def accept(self):
            raise OSError(errno.EMFILE, "Too many open files")

    rpc_server._channels._listener._socket = Full()
    rpc_client = RpcClient(PS, rpc_server.address)
    try:
        answer = rpc_client.send(Frame(Op.PULL, 1), LONG)
        while not rpc_server._channels.is_paused:
            time.sleep(0.01)
        assert most(polls) <= FEW
        assert caplog.text.count("Too many open files. It is tried again.") == 1
        rpc_server._channels._listener._socket = listening
        assert answer.result(LONG).op is Op.OK
        assert not rpc_server._channels.is_paused
        assert rpc_client.call(Frame(Op.PULL, 2), LONG).op is Op.OK
        assert most(polls) <= FEW
    finally:
        rpc_client.close()


def test_a_peer_that_can_open_no_files_tries_again(busy_server, monkeypatch):
    rpc_server, _ = busy_server
    attempts = []
    new_socket = _sockets.new_socket

    def full(context, kind, limit):
        attempts.append(kind)
        if len(attempts) < 3:
            raise zmq.ZMQError(errno.EMFILE)
        return new_socket(context, kind, limit)

    monkeypatch.setattr(_sockets, "new_socket", full)
    rpc_client = RpcClient(PS, rpc_server.address)
    try:
        assert rpc_client.call(Frame(Op.PULL, 1), LONG).op is Op.OK
        assert len(attempts) == 3
    finally:
        rpc_client.close()


def test_a_peer_without_its_task_sleeps_between_its_attempts(polls):
    rpc_server = RpcServer("127.0.0.1:0", lambda client, request: request.answer(Op.OK))
    rpc_server.start()
    rpc_client = RpcClient(PS, rpc_server.address)
    try:
        rpc_client.call(Frame(Op.PULL, 1), LONG)
        rpc_server.close()
        with pytest.raises(PeerLostError):
            rpc_client.call(Frame(Op.PULL, 2), 0.2)
        # Each attempt has some events.
        assert most(polls, 1.0) <= 10 * FEW
    finally:
        rpc_client.close()
