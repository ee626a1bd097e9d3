"""Clients and servers within a process."""

import threading
from concurrent.futures import wait

import numpy as np
import pytest
from tests.support import LIMIT

from unisono._errors import ClusterError
from unisono.cluster_resolver._spec import Task
from unisono.rpc._calls import PeerLostError
from unisono.rpc._frames import Frame
from unisono.rpc._loopback import LoopbackNetwork
from unisono.rpc._ops import Op

PS = Task("ps", 0)


@pytest.fixture
def network():
    return LoopbackNetwork()


def echo(client, request):
    return request.answer(Op.OK, {**request.meta, "from": str(client.task)}, request.arrays)


def serving(network, handler=echo, address="a"):
    rpc_server = network.rpc_server(address, handler)
    rpc_server.start()
    return rpc_server


def test_a_call_returns_the_answer(network):
    rpc_server, rpc_client = serving(network), network.rpc_client(PS, "a", own=Task("worker", 1))
    sent = np.arange(3.0)
    answer = rpc_client.call(Frame(Op.PULL, 5, meta={"x": 1}, arrays=[sent]), 10)
    assert (answer.op, answer.request, answer.meta) == (Op.OK, 5, {"x": 1, "from": "worker:1"})
    np.testing.assert_array_equal(answer.arrays[0], sent)
    assert not np.shares_memory(answer.arrays[0], sent)
    rpc_client.close()
    rpc_server.close()


def test_answers_may_come_later_and_in_another_order(network):
    late = []

    def handler(client, request):
        if request.op is Op.RUN:
            late.append((client, request))
            return None
        for each in late:
            rpc_server.reply(each[0], each[1].answer(Op.RESULT))
        return request.answer(Op.OK)

    rpc_server, rpc_client = serving(network, handler), network.rpc_client(PS, "a")
    first = rpc_client.send(Frame(Op.RUN, 1))
    assert rpc_client.call(Frame(Op.STATUS, 2), 10).op is Op.OK
    assert first.result(LIMIT).op is Op.RESULT
    rpc_server.close()


def test_an_exception_of_the_handler_is_an_answer(network, caplog):
    def handler(client, request):
        raise KeyError("w")

    rpc_server, rpc_client = serving(network, handler), network.rpc_client(PS, "a")
    answer = rpc_client.call(Frame(Op.PULL, 1), 10)
    assert answer.op is Op.ERROR
    assert answer.meta == {"kind": "KeyError", "text": "'w'"}
    assert "PULL" in caplog.text
    rpc_server.close()


def test_a_request_waits_for_its_endpoint(network):
    rpc_client = network.rpc_client(PS, "a")
    early = rpc_client.send(Frame(Op.PULL, 1))
    with pytest.raises(PeerLostError):
        rpc_client.call(Frame(Op.PULL, 2), 0.01)
    seen = []

    def handler(client, request):
        seen.append(request.request)
        return request.answer(Op.OK)

    rpc_server = serving(network, handler)
    assert early.result(LIMIT).request == 1
    # The second one was given up.
    assert seen == [1]
    rpc_server.close()


def test_a_timeout_names_task_and_address(network):
    rpc_server, rpc_client = serving(network, lambda client, request: None), network.rpc_client(PS, "a:1")
    with pytest.raises(PeerLostError, match=r"ps:0 at a:1 to PULL after 0\.0") as caught:
        rpc_client.call(Frame(Op.PULL, 1), 0.01)
    assert (caught.value.task, caught.value.address) == (PS, "a:1")
    assert isinstance(rpc_client.send(Frame(Op.PULL, 2), 0.01).exception(10), PeerLostError)
    rpc_server.close()


def test_a_request_without_an_answer_fails_when_its_endpoint_closes(network):
    arrived = threading.Event()
    rpc_server = serving(network, lambda client, request: arrived.set())
    rpc_client = network.rpc_client(PS, "a")
    future = rpc_client.send(Frame(Op.PULL, 1))
    assert arrived.wait(LIMIT)
    rpc_server.close()
    with pytest.raises(PeerLostError, match="connection was lost"):
        future.result(LIMIT)
    # The next server at the address gets the same request.
    rpc_server = serving(network)
    assert rpc_client.call(Frame(Op.PULL, 1), 10).request == 1
    rpc_server.close()


def test_messages_that_are_lost_or_repeated():
    seen = []

    def handler(client, request):
        seen.append(request.request)
        return request.answer(Op.OK)

    lost = LoopbackNetwork(lambda frame, is_answer: int(not is_answer or frame.request != 1))
    rpc_server, rpc_client = serving(lost, handler), lost.rpc_client(PS, "a")
    with pytest.raises(PeerLostError):
        rpc_client.call(Frame(Op.PUSH, 1), 0.05)
    assert rpc_client.call(Frame(Op.PUSH, 2), 10).op is Op.OK
    assert seen == [1, 2]
    rpc_server.close()

    seen.clear()
    twice = LoopbackNetwork(lambda frame, is_answer: 2)
    rpc_server, rpc_client = serving(twice, handler), twice.rpc_client(PS, "a")
    for number in range(3):
        assert rpc_client.call(Frame(Op.PUSH, number), 10).request == number
    assert rpc_client.call(Frame(Op.STATUS, 9), 10).op is Op.OK
    assert seen[:6] == [0, 0, 1, 1, 2, 2]
    rpc_server.close()


def test_many_threads(network):
    rpc_server, rpc_client = serving(network), network.rpc_client(PS, "a")
    answers = {}

    def work(thread):
        for i in range(50):
            number = thread * 1000 + i
            answers[number] = rpc_client.call(Frame(Op.PULL, number, meta={"n": number}), 30).meta["n"]

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 200
    assert all(k == v for k, v in answers.items())
    rpc_server.close()


def test_an_address_has_one_endpoint(network):
    rpc_server = serving(network)
    second = network.rpc_server("a", echo)
    with pytest.raises(ClusterError, match="a, which is in use"):
        second.start()
    second.close()
    assert network.rpc_client(PS, "a").call(Frame(Op.STATUS, 1), 10).op is Op.OK
    rpc_server.close()


def test_a_closed_peer_fails_its_requests(network):
    rpc_client = network.rpc_client(PS, "a")
    futures = [rpc_client.send(Frame(Op.PULL, n)) for n in range(3)]
    rpc_client.close()
    assert all(isinstance(f.exception(10), PeerLostError) for f in wait(futures).done)
    with pytest.raises(PeerLostError, match="before its client is closed"):
        rpc_client.send(Frame(Op.PULL, 4))
