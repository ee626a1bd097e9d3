"""Clients and servers over ZeroMQ: between threads of this process, which is the same to ZeroMQ."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import zmq

from unisono._errors import ClusterError, ContextError
from unisono.cluster_resolver._spec import ClusterSpec, Task, split_address
from unisono.rpc._calls import ClientId, PeerLostError, PeerRejectedError
from unisono.rpc._frames import ALIGNMENT, Frame, FrameError
from unisono.rpc._ops import Op
from unisono.rpc._transport import _client_thread, _local, _local_channel, _shared_memory
from unisono.rpc._transport._client import RpcClient
from unisono.rpc._transport._keys import keys_of, new_secret
from unisono.rpc._transport._server import RpcServer

PS, WORKER = Task("ps", 0), Task("worker", 0)
SPEC = ClusterSpec({"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]})
SECRET = new_secret()
#: Seconds until something is taken to hang.
LONG = 30.0


def keys(own, secret=SECRET, spec=SPEC):
    return keys_of(secret, own, spec)


def echo(client, request):
    who = {"task": str(client.task), "same user": client.is_same_user}
    return request.answer(Op.OK, {**request.meta, **who}, request.arrays)


@pytest.fixture
def cluster():
    """Makes servers that have started, and clients; all are closed at the end."""
    made = []

    class Cluster:
        def rpc_server(self, handler=echo, address="127.0.0.1:0", **options):
            rpc_server = RpcServer(address, handler, **options)
            made.append(rpc_server)
            rpc_server.start()
            return rpc_server

        def rpc_client(self, address, task=PS, **options):
            made.append(RpcClient(task, address, **options))
            return made[-1]

    yield Cluster()
    started = time.monotonic()
    for each in reversed(made):
        each.close()
    assert time.monotonic() - started < LONG


@pytest.fixture
def only_tcp(monkeypatch):
    """A machine on which this user has no directory for sockets."""

    def fail(parent=""):
        raise ClusterError("no directory")

    monkeypatch.setattr(_local, "socket_directory", fail)


# --- calls


def test_a_call_returns_the_answer(cluster):
    rpc_server = cluster.rpc_server()
    answer = cluster.rpc_client(rpc_server.address).call(Frame(Op.PULL, 5, 2, {"x": 1}, [np.arange(3)]), LONG)
    assert (answer.op, answer.request, answer.generation) == (Op.OK, 5, 2)
    assert answer.meta == {"x": 1, "task": "None", "same user": True}
    np.testing.assert_array_equal(answer.arrays[0], np.arange(3))


@pytest.mark.parametrize("is_direct", [True, False])
def test_large_arrays_are_not_copied(cluster, is_direct, tuned):
    tuned(_shared_memory, IS_AVAILABLE=is_direct)
    seen = []

    def handler(client, request):
        seen.append(request.arrays[0])
        return request.answer(Op.OK, None, [request.arrays[0]])

    rpc_server = cluster.rpc_server(handler)
    sent = np.arange(1 << 20, dtype=np.float32)
    answer = cluster.rpc_client(rpc_server.address).call(Frame(Op.PUSH, 1, arrays=[sent]), LONG)
    np.testing.assert_array_equal(answer.arrays[0], sent)
    for array in (seen[0], answer.arrays[0]):
        # A view of memory that both processes have, or of what ZeroMQ has received.
        assert isinstance(array.base, _shared_memory._MessageBytes if is_direct else zmq.Frame)
        assert not array.flags.writeable
        assert not is_direct or array.ctypes.data % ALIGNMENT == 0


def test_answers_may_come_later_and_in_another_order(cluster):
    late = []

    def handler(client, request):
        if request.op is Op.RUN:
            late.append((client, request))
            return None

        def answer():
            for asked, each in reversed(late):
                rpc_server.reply(asked, each.answer(Op.RESULT, {"n": each.request}))

        threading.Thread(target=answer).start()
        return request.answer(Op.OK)

    rpc_server = cluster.rpc_server(handler)
    rpc_client = cluster.rpc_client(rpc_server.address)
    futures = [rpc_client.send(Frame(Op.RUN, number)) for number in (1, 2, 3)]
    rpc_client.call(Frame(Op.STATUS, 4), LONG)
    assert [f.result(LONG).meta["n"] for f in futures] == [1, 2, 3]


def test_an_exception_of_the_handler_is_an_answer(cluster):
    def handler(client, request):
        raise KeyError("w") if request.op is Op.PULL else SystemError("other")

    rpc_client = cluster.rpc_client(cluster.rpc_server(handler).address)
    assert rpc_client.call(Frame(Op.PULL, 1), LONG).meta == {"kind": "KeyError", "text": "'w'"}
    assert rpc_client.call(Frame(Op.PUSH, 2), LONG).meta["kind"] == "SystemError"


def test_too_many_bytes_are_the_senders_error(cluster):
    """ZeroMQ would close the connection, and the request be sent again and again."""

    def handler(client, request):
        return request.answer(Op.OK, None, [np.zeros(2000)] if request.op is Op.PULL else ())

    rpc_client = cluster.rpc_client(cluster.rpc_server(handler, limit=10_000).address, limit=10_000)
    with pytest.raises(FrameError, match=r"at most 10000 bytes, .* Received: 16048"):
        rpc_client.send(Frame(Op.PUSH, 1, arrays=[np.zeros(2000)]))
    answer = rpc_client.call(Frame(Op.PULL, 2), LONG)
    assert (answer.op, answer.meta["kind"]) == (Op.ERROR, "FrameError")
    assert rpc_client.call(Frame(Op.STATUS, 3), LONG).op is Op.OK


def test_an_answer_that_cannot_be_sent_is_an_error(cluster):
    rpc_server = cluster.rpc_server(lambda client, request: request.answer(Op.OK, {"x": object()}))
    answer = cluster.rpc_client(rpc_server.address).call(Frame(Op.PULL, 1), LONG)
    assert (answer.op, answer.meta["kind"]) == (Op.ERROR, "FrameError")


def test_many_threads_and_peers(cluster):
    rpc_server = cluster.rpc_server()
    rpc_clients = [cluster.rpc_client(rpc_server.address) for _ in range(3)]
    wrong = []

    def work(thread):
        for i in range(60):
            number = thread * 1000 + i
            answer = rpc_clients[i % 3].call(Frame(Op.PULL, number, meta={"n": number}), LONG)
            if answer.request != number or answer.meta["n"] != number:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- loss


def test_a_timeout_names_task_and_address(cluster):
    rpc_server = cluster.rpc_server(lambda client, request: None)
    rpc_client = cluster.rpc_client(rpc_server.address)
    words = rf"ps:0 at {rpc_server.address} to PULL after 0\.[0-9]+ s \("
    with pytest.raises(PeerLostError, match=words) as caught:
        rpc_client.call(Frame(Op.PULL, 1), 0.05)
    assert (caught.value.task, caught.value.address) == (PS, rpc_server.address)
    assert isinstance(rpc_client.send(Frame(Op.PULL, 2), 0.05).exception(LONG), PeerLostError)


def test_a_timeout_wakes_a_thread_that_sleeps_without_one(cluster):
    def answer(client, request):
        return Frame(Op.OK, request.request) if request.meta else None

    rpc_server = cluster.rpc_server(answer)
    rpc_client = cluster.rpc_client(rpc_server.address)
    # Without a deadline: afterwards the thread of the clients sleeps for a minute.
    rpc_client.send(Frame(Op.PULL, 1, meta={"answer": 1})).result(LONG)
    time.sleep(0.1)
    assert isinstance(rpc_client.send(Frame(Op.PULL, 2), 0.05).exception(LONG), PeerLostError)


def test_a_request_waits_until_its_task_has_started(cluster):
    address = f"127.0.0.1:{_local.free_port()}"
    rpc_client = cluster.rpc_client(address)
    future = rpc_client.send(Frame(Op.PULL, 1))
    with pytest.raises(PeerLostError, match="connection refused"):
        rpc_client.call(Frame(Op.PULL, 2), 0.5)
    seen = []

    def handler(client, request):
        seen.append(request.request)
        return request.answer(Op.OK)

    cluster.rpc_server(handler, address)
    assert future.result(LONG).request == 1
    # The second one was given up before there was a connection.
    assert seen == [1]


def test_a_task_that_is_restarted_gets_the_same_request_again(cluster):
    arrived = threading.Event()
    first = cluster.rpc_server(lambda client, request: arrived.set())
    rpc_client = cluster.rpc_client(first.address)
    future = rpc_client.send(Frame(Op.PUSH, 77))
    assert arrived.wait(LONG)
    first.close()
    # At once, and not after the timeout, of which there is none.
    with pytest.raises(PeerLostError, match="connection was lost"):
        future.result(LONG)
    cluster.rpc_server(echo, first.address)
    assert rpc_client.call(Frame(Op.PUSH, 77), LONG).request == 77


def test_an_answer_that_comes_late_is_dropped(cluster):
    asked = []
    rpc_server = cluster.rpc_server(lambda client, request: asked.append((client, request)))
    rpc_client = cluster.rpc_client(rpc_server.address)
    with pytest.raises(PeerLostError):
        rpc_client.call(Frame(Op.PULL, 1), 0.2)
    future = rpc_client.send(Frame(Op.PULL, 2))
    while len(asked) < 2:
        time.sleep(0.01)
    for client, request in asked:
        rpc_server.reply(client, request.answer(Op.OK))
    assert future.result(LONG).request == 2


def test_a_request_whose_number_waits_is_sent_again(cluster):
    seen = []

    def handler(client, request):
        seen.append(request.request)
        return request.answer(Op.OK) if len(seen) == 2 else None

    rpc_client = cluster.rpc_client(cluster.rpc_server(handler).address)
    first = rpc_client.send(Frame(Op.PUSH, 5))
    assert rpc_client.send(Frame(Op.PUSH, 5)) is first
    assert first.result(LONG).request == 5
    assert seen == [5, 5]


def test_send_waits_for_room(cluster):
    release = threading.Event()

    def handler(client, request):
        release.wait(LONG)
        return request.answer(Op.OK)

    rpc_client = cluster.rpc_client(cluster.rpc_server(handler).address, budget=100_000)
    first = rpc_client.send(Frame(Op.PUSH, 1, arrays=[np.zeros(80_000, np.uint8)]))
    with pytest.raises(PeerLostError):
        rpc_client.send(Frame(Op.PUSH, 2, arrays=[np.zeros(80_000, np.uint8)]), 0.05)
    release.set()
    assert rpc_client.call(Frame(Op.PUSH, 3, arrays=[np.zeros(80_000, np.uint8)]), LONG).op is Op.OK
    assert first.result(LONG).op is Op.OK


def test_a_client_that_takes_no_answers_gets_no_more(cluster):
    """Without a limit they would fill the server's memory."""
    asked = threading.Event()
    clients = []

    def handler(client, request):
        clients.append(client)
        asked.set()

    rpc_server = cluster.rpc_server(handler, budget=3 << 20)
    rpc_client = cluster.rpc_client(rpc_server.address)
    rpc_client.send(Frame(Op.PULL, 1))
    assert asked.wait(LONG)
    stop = threading.Event()
    rpc_client._thread.mailbox.put(lambda: stop.wait(LONG))
    alive = []
    for _ in range(60):
        array = np.zeros(1 << 20, np.uint8)
        alive.append(weakref.ref(array))
        rpc_server.reply(clients[0], Frame(Op.OK, 2, arrays=[array]))
        del array
    deadline = time.monotonic() + LONG
    while (count := sum(ref() is not None for ref in alive)) > 10 and time.monotonic() < deadline:
        time.sleep(0.01)
    stop.set()
    # ZeroMQ's threads have taken some, and the socket's buffers.
    assert count <= 10


def test_small_answers_wait_where_they_are_counted(cluster, tuned):
    """More than ZeroMQ's queue and the kernel's buffers hold."""
    tuned(_shared_memory, IS_AVAILABLE=False)
    asked = threading.Event()
    clients = []

    def handler(client, request):
        clients.append(client)
        asked.set()

    rpc_server = cluster.rpc_server(handler, budget=30 << 20)
    rpc_client = cluster.rpc_client(rpc_server.address)
    futures = [rpc_client.send(Frame(Op.PULL, number)) for number in range(400)]
    assert asked.wait(LONG)
    stop = threading.Event()
    rpc_client._thread.mailbox.put(lambda: stop.wait(LONG))
    data = np.zeros(60_000, np.uint8)
    # Fewer bytes than the budget, but more messages than ZeroMQ takes; all but the last are for no request.
    for number in [*[10**6] * 1400, *range(400)]:
        rpc_server.reply(clients[0], Frame(Op.OK, number, arrays=[data] if number >= 10**6 else []))
    deadline = time.monotonic() + LONG
    while not rpc_server._backlog and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sum(rpc_server._unsent.values()) <= 30 << 20
    stop.set()
    assert all(future.result(LONG).op is Op.OK for future in futures)
    assert not rpc_server._backlog
    assert not rpc_server._unsent


class FrameOfAnotherVersion(Frame):
    """What a task with another version of Unisono sends."""

    def parts(self, *args, **kwargs):
        parts = [bytearray(part) for part in super().parts(*args, **kwargs)]
        parts[0][4] = 2
        return parts


def test_a_version_that_differs_is_answered_with_an_error(cluster):
    rpc_client = cluster.rpc_client(cluster.rpc_server().address)
    answer = rpc_client.send(FrameOfAnotherVersion(Op.PULL, 1)).result(LONG)
    assert (answer.op, answer.meta["kind"]) == (Op.ERROR, "FrameError")
    assert "one version of Unisono" in answer.meta["text"]


def test_rejections_do_not_wait_for_who_takes_none(cluster):
    """They would fill the memory of the task that is attacked."""
    rpc_server = cluster.rpc_server()
    parts = Frame(Op.PULL, 1).parts()
    parts[0] = parts[0][:4] + b"\2" + parts[0][5:]
    context = zmq.Context()
    with context.socket(zmq.DEALER) as deaf:
        deaf.linger, deaf.rcvhwm, deaf.rcvbuf = 0, 1, 1000
        deaf.connect(f"ipc://{_local.socket_path(rpc_server.address, _local.socket_directory())}")
        for _ in range(30_000):
            deaf.send_multipart(parts)
        # After the answer all of them were handled.
        while rpc_server.rejected < 30_000:
            time.sleep(0.01)
        assert cluster.rpc_client(rpc_server.address).call(Frame(Op.PULL, 1), LONG).op is Op.OK
        assert not rpc_server._backlog
    context.term()


def test_who_has_gone_gets_no_answer(cluster):
    rpc_server = cluster.rpc_server()
    for connection in (b"local gone", b"tcp gone"):
        rpc_server.reply(ClientId(connection), Frame(Op.OK, 1))
    assert cluster.rpc_client(rpc_server.address).call(Frame(Op.PULL, 1), LONG).op is Op.OK


# --- ends


def test_close_does_not_wait_for_a_handler(cluster):
    arrived, release = threading.Event(), threading.Event()

    def handler(client, request):
        arrived.set()
        release.wait(LONG)

    rpc_server = cluster.rpc_server(handler)
    rpc_client = cluster.rpc_client(rpc_server.address)
    future = rpc_client.send(Frame(Op.RUN, 1))
    assert arrived.wait(LONG)
    rpc_server.close(0.2)
    assert not future.done()
    release.set()
    assert isinstance(future.exception(LONG), PeerLostError)


def test_a_handler_may_close_its_endpoint_after_its_answer(cluster):
    def handler(client, request):
        rpc_server.reply(client, request.answer(Op.OK))
        rpc_server.close()

    rpc_server = cluster.rpc_server(handler)
    assert cluster.rpc_client(rpc_server.address).call(Frame(Op.END, 1), LONG).op is Op.OK


def test_an_answer_that_waits_for_room_is_sent_before_the_endpoint_is_closed(cluster, tuned):
    """Found by the simulation: what the kernel's buffer had no room for was dropped."""
    tuned(_local_channel, SHARED_FROM=1 << 60)

    def handler(client, request):
        rpc_server.reply(client, request.answer(Op.OK, None, [np.zeros(16 << 20, "uint8")]))
        rpc_server.close()

    rpc_server = cluster.rpc_server(handler)
    answer = cluster.rpc_client(rpc_server.address).call(Frame(Op.PULL, 1), LONG)
    assert answer.arrays[0].nbytes == 16 << 20


def test_a_closed_peer_fails_its_requests(cluster):
    rpc_server = cluster.rpc_server(lambda client, request: None)
    rpc_client = cluster.rpc_client(rpc_server.address)
    futures = [rpc_client.send(Frame(Op.PULL, n)) for n in range(3)]
    rpc_client.close()
    assert all(isinstance(f.exception(LONG), PeerLostError) for f in futures)
    with pytest.raises(PeerLostError, match="before its client is closed"):
        rpc_client.call(Frame(Op.PULL, 4), LONG)


def test_a_future_may_send_and_close_when_it_is_done(cluster):
    """In the thread of the answers, which must not wait for one."""
    rpc_server = cluster.rpc_server()
    rpc_client = cluster.rpc_client(rpc_server.address, budget=10)
    second = []
    done = threading.Event()

    def follow(future):
        rpc_client.send(Frame(Op.PULL, 2)).add_done_callback(
            lambda f: (second.append(f.result()), done.set())
        )
        rpc_client.send(Frame(Op.PULL, 3)).add_done_callback(lambda f: rpc_client.close())

    rpc_client.send(Frame(Op.PULL, 1)).add_done_callback(follow)
    assert done.wait(LONG)
    assert second[0].request == 2


def test_the_thread_ends_with_the_last_peer(cluster):
    rpc_server = cluster.rpc_server()
    first, second = cluster.rpc_client(rpc_server.address), cluster.rpc_client(rpc_server.address)
    thread = first._thread
    assert second._thread is thread
    first.close()
    assert second.call(Frame(Op.PULL, 1), LONG).op is Op.OK
    second.close()
    assert not thread.is_alive()
    assert _client_thread._THREAD is None


def test_an_interrupt_ends_a_call(cluster):
    rpc_client = cluster.rpc_client(cluster.rpc_server(lambda client, request: None).address)
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        rpc_client.call(Frame(Op.PULL, 1), LONG)
    timer.join()
    assert rpc_client._pending.bytes_in_flight == 0


# Python and JAX warn of forks where there are threads.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:os.fork:RuntimeWarning")
def test_a_forked_process_has_no_peers(cluster):
    rpc_server = cluster.rpc_server()
    rpc_client = cluster.rpc_client(rpc_server.address)
    rpc_client.call(Frame(Op.PULL, 1), LONG)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            rpc_client.close()
            rpc_client.send(Frame(Op.PULL, 2))
        except ContextError:
            # A new one works, if its server is another process.
            mine = RpcClient(PS, rpc_server.address)
            code = 0 if mine.call(Frame(Op.PULL, 3), LONG).op is Op.OK else 2
            mine.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert rpc_client.call(Frame(Op.PULL, 4), LONG).op is Op.OK


# --- who may connect


def test_without_keys_nothing_listens_on_the_network(cluster):
    rpc_server = cluster.rpc_server()
    _, port = split_address(rpc_server.address)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), LONG)


@pytest.mark.parametrize("address", ["10.0.0.1:2222", "node1:2222", "0.0.0.0:2222"])
def test_other_machines_need_a_key(address):
    for make in (lambda: RpcServer(address, echo), lambda: RpcClient(PS, address)):
        with pytest.raises(ClusterError, match=f"{address}, and no key. Set UNISONO_CLUSTER_KEY"):
            make()


def test_processes_of_one_machine_and_user_use_a_file(cluster):
    rpc_server = cluster.rpc_server(keys=keys(PS))
    answer = cluster.rpc_client(rpc_server.address, keys=keys(WORKER)).call(Frame(Op.PULL, 1), LONG)
    assert answer.meta == {"task": "None", "same user": True}


def test_with_keys_the_task_is_known(cluster, only_tcp):
    rpc_server = cluster.rpc_server(keys=keys(PS))
    answer = cluster.rpc_client(rpc_server.address, keys=keys(WORKER)).call(Frame(Op.PULL, 1), LONG)
    assert answer.meta == {"task": "worker:0", "same user": False}


def test_names_of_hosts(cluster, only_tcp):
    rpc_server = cluster.rpc_server(keys=keys(PS), address="localhost:0")
    assert rpc_server.address.startswith("localhost:")
    rpc_client = cluster.rpc_client(rpc_server.address, keys=keys(WORKER))
    assert rpc_client.call(Frame(Op.PULL, 1), LONG).op is Op.OK
    lost = cluster.rpc_client("no-such-host.invalid:1", keys=keys(WORKER))
    with pytest.raises(PeerLostError, match="the name no-such-host"):
        lost.call(Frame(Op.PULL, 1), 0.5)


@pytest.mark.parametrize(
    ("client", "server", "words"),
    [
        (keys(WORKER, new_secret()), PS, "cannot read messages that are encrypted"),
        (keys(Task("worker", 5)), PS, "does not admit the key of this task"),
        (keys(WORKER), Task("ps", 1), "cannot read messages that are encrypted"),
    ],
    ids=["another cluster", "not on the list", "another server"],
)
def test_a_wrong_key_is_an_error_at_once(cluster, only_tcp, client, server, words):
    rpc_server = cluster.rpc_server(keys=keys(PS))
    rpc_client = cluster.rpc_client(rpc_server.address, task=server, keys=client)
    with pytest.raises(PeerRejectedError, match=f"{server} at {rpc_server.address} .*{words}"):
        rpc_client.call(Frame(Op.PULL, 1), LONG)
    # And the server answers those that have the key.
    assert cluster.rpc_client(rpc_server.address, keys=keys(WORKER)).call(Frame(Op.PULL, 1), LONG).op is Op.OK


def test_a_task_that_was_restarted_with_the_right_key_answers(cluster, only_tcp):
    wrong = cluster.rpc_server(keys=keys(PS, new_secret()))
    rpc_client = cluster.rpc_client(wrong.address, keys=keys(WORKER))
    with pytest.raises(PeerRejectedError):
        rpc_client.call(Frame(Op.PULL, 1), LONG)
    wrong.close()
    cluster.rpc_server(keys=keys(PS), address=wrong.address)
    deadline = time.monotonic() + LONG
    while True:
        try:
            assert rpc_client.call(Frame(Op.PULL, 1), LONG).op is Op.OK
            break
        except ClusterError:
            assert time.monotonic() < deadline


def test_what_does_not_answer_a_handshake_is_named(cluster, only_tcp, monkeypatch):
    monkeypatch.setattr("unisono.rpc._transport._sockets.HANDSHAKE_MS", 50)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        rpc_client = cluster.rpc_client(f"127.0.0.1:{mute.getsockname()[1]}", keys=keys(WORKER))
        with pytest.raises(PeerLostError, match="did not answer a handshake within"):
            rpc_client.call(Frame(Op.PULL, 1), 1.0)


def test_a_task_that_was_started_between_two_looks_is_reached_by_its_file(cluster, monkeypatch):
    """Its TCP port is open only after its file is there; encryption on one machine would be slow."""
    address = f"127.0.0.1:{_local.free_port()}"
    rpc_client = cluster.rpc_client(address, keys=keys(WORKER))
    future = rpc_client.send(Frame(Op.PULL, 1))
    cluster.rpc_server(address=address, keys=keys(PS))
    assert future.result(LONG).meta["same user"]


# --- the file of a socket


def test_the_directory_is_of_this_user_alone(tmp_path):
    path = _local.socket_directory(str(tmp_path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert _local.socket_directory(str(tmp_path)) == path
    path.chmod(0o755)
    with pytest.raises(ClusterError, match="its mode is 0755"):
        _local.socket_directory(str(tmp_path))
    path.rmdir()
    path.symlink_to(tmp_path)
    with pytest.raises(ClusterError, match="not a directory"):
        _local.socket_directory(str(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_a_directory_of_another_user_is_not_used(tmp_path):
    path = _local.socket_directory(str(tmp_path))
    os.chown(path, 12345, -1)
    with pytest.raises(ClusterError, match="belongs to the user 12345"):
        _local.socket_directory(str(tmp_path))


def test_a_file_that_a_dead_process_left_is_replaced(cluster):
    address = f"127.0.0.1:{_local.free_port()}"
    path = _local.socket_path(address, _local.socket_directory())
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    rpc_server = cluster.rpc_server(address=address)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert cluster.rpc_client(address).call(Frame(Op.PULL, 1), LONG).op is Op.OK
    rpc_server.close()
    assert not list(path.parent.glob(f"{path.name}*"))


def test_an_address_has_one_endpoint_and_a_second_one_does_not_end_the_lock_of_the_first(cluster):
    first = cluster.rpc_server()
    with pytest.raises(ClusterError, match=f"process {os.getpid()} listens"):
        cluster.rpc_server(address=first.address)
    path = _local.socket_path(first.address, _local.socket_directory())
    code = f"""
from pathlib import Path
from unisono.rpc._transport._local import AddressLock
try:
    AddressLock(Path({str(path)!r}))
except RuntimeError as error:
    print(error)
"""
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert f"where the process {os.getpid()} listens" in text
    assert cluster.rpc_client(first.address).call(Frame(Op.PULL, 1), LONG).op is Op.OK


def test_the_files_of_tasks_that_were_killed_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(_local, "socket_directory", lambda: tmp_path)
    ends = ("", ".lock", ".channel", ".ended")
    for port in ("222", "2222"):
        for host in ("127.0.0.1", "..1"):
            for end in ends:
                (tmp_path / f"{host}-{port}{end}").touch()
    _local.remove_sockets(["127.0.0.1:222", "[::1]:222", "127.0.0.1:9"])
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{host}-2222{end}" for host in ("127.0.0.1", "..1") for end in ends
    }


def test_an_address_of_another_machine_cannot_be_listened_at(cluster, only_tcp, monkeypatch):
    monkeypatch.setattr("unisono.rpc._transport._server._BIND_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"listen at its address.*{address}: Address already in use"):
            cluster.rpc_server(address=address, keys=keys(PS))


def test_without_a_key_the_port_of_another_program_cannot_be_used(cluster, monkeypatch):
    monkeypatch.setattr("unisono.rpc._transport._server._BIND_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"listen at its address.*{address}: Address already in use"):
            cluster.rpc_server(address=address)
    # Free again: the lock and the files of the first attempt are gone, too.
    rpc_client = cluster.rpc_client(cluster.rpc_server(address=address).address)
    assert rpc_client.call(Frame(Op.PULL, 1), LONG).op is Op.OK


def test_a_service_address_listens_on_all_interfaces(cluster, only_tcp):
    """In Kubernetes a pod knows itself by the name of its service, whose address no interface has."""
    port = _local.free_port()
    rpc_server = cluster.rpc_server(address=f"192.0.2.1:{port}", keys=keys(PS))
    assert rpc_server.address == f"192.0.2.1:{port}"
    rpc_client = cluster.rpc_client(f"127.0.0.1:{port}", keys=keys(WORKER))
    assert rpc_client.call(Frame(Op.PULL, 1), LONG).meta["task"] == "worker:0"


def test_a_port_has_one_endpoint_also_where_one_has_a_key_and_the_other_is_local(cluster, monkeypatch):
    monkeypatch.setattr("unisono.rpc._transport._server._BIND_SECONDS", 0.1)
    local = cluster.rpc_server()
    everywhere = f"0.0.0.0:{split_address(local.address)[1]}"
    with pytest.raises(ClusterError, match=f"{local.address}, where the process {os.getpid()} listens"):
        cluster.rpc_server(address=everywhere, keys=keys(PS))
    local.close()
    cluster.rpc_server(address=everywhere, keys=keys(PS))
    with pytest.raises(ClusterError, match="Address already in use"):
        cluster.rpc_server(address=local.address)


def test_who_refuses_connections(cluster):
    local = cluster.rpc_server().address
    assert not _local.is_refused(local)
    assert _local.is_refused(f"127.0.0.1:{_local.free_port()}")
    # What a killed process has left.
    gone = f"127.0.0.1:{_local.free_port()}"
    path = _local.socket_path(gone, _local.socket_directory())
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert _local.is_refused(gone)
    path.unlink()
    # A process that is stopped takes connections, and a name without an address says nothing.
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        assert not _local.is_refused(f"127.0.0.1:{stopped.getsockname()[1]}")
    assert not _local.is_refused("host.invalid:1")


FLOODED = """
import sys, time, zmq
from unisono.rpc._transport import _sockets
_sockets._HEARTBEAT_MS = 100
context, path = zmq.Context(), "ipc://" + sys.argv[1]
made = _sockets.new_socket(context, zmq.ROUTER, 1 << 20)
made.bind(path)
other = zmq.Context()
client = _sockets.new_socket(other, zmq.DEALER, 1 << 20)
client.connect(path)
for _ in range(1000):
    client.send(b"x" * 10_000)
time.sleep(0.3)
client.close()
other.term()
time.sleep(0.5)
print("alive", len(made.recv_multipart()))
"""


def test_a_client_that_floods_and_goes_away_does_not_end_a_server_that_stands_still(tmp_path):
    """With heartbeats of the server's own libzmq aborts the process."""
    command = [sys.executable, "-c", FLOODED, str(tmp_path / "socket")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "alive 2\n"), done.stderr
