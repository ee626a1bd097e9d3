"""Processes exchange addresses and find out who is not reached: threads with real status servers."""

import concurrent.futures
import threading
import time

import pytest

from unisono._errors import ClusterError
from unisono.cluster._introduction import introduce
from unisono.cluster.liveness._status import WorkerStatus
from unisono.cluster.liveness._status_server import Peers, StatusServer

LIMIT = 30.0


class Board:
    """A board in memory, which ends with the first process; it is read when so many texts are posted."""

    def __init__(self, least):
        self._texts, self._changed, self.is_open, self._least = {}, threading.Condition(), True, least

    def post(self, key, text, seconds):
        with self._changed:
            self._texts[key] = text
            self._changed.notify_all()

    def read(self, key, seconds):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._texts) >= self._least, LIMIT)
            self._changed.wait_for(lambda: key in self._texts and self.is_open, seconds)
            return self._texts.get(key) if self.is_open else None

    def close(self):
        self.is_open = False


@pytest.fixture
def servers():
    made = [StatusServer("127.0.0.1", WorkerStatus(), "x") for _ in range(3)]
    yield made
    for each in made:
        each.close()


def introduced(ports, seconds=LIMIT, absent=(), timeout=5.0):
    """What each process gets, or the text of its error."""
    board, names = Board(len(ports) - len(absent)), tuple(f"worker {i}" for i in range(len(ports)))

    def run(i):
        addresses = tuple(f"127.0.0.1:{port}" if j == i else "" for j, port in enumerate(ports))
        try:
            return introduce(board, Peers(i, addresses, names, "x", timeout), seconds).addresses
        except ClusterError as error:
            # A process that raises ends, and the board with the first one; one that returns goes on.
            if i == 0:
                board.close()
            return str(error)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(run, [i for i in range(len(ports)) if i not in absent]))


def test_all_know_the_addresses_of_all(servers):
    ports = [server.port for server in servers]
    assert introduced(ports) == [tuple(f"127.0.0.1:{port}" for port in ports)] * 3


def test_all_raise_the_same_error_that_names_the_address(servers):
    """Also the others, whose board ends with the first process."""
    ports = [server.port for server in servers]
    servers[2].close()
    texts = introduced(ports)
    assert len(set(texts)) == 1
    for i in (0, 1):
        at = f"127.0.0.1:{ports[2]}, which worker 2 has published: the connection is refused"
        assert f"worker {i} does not reach {at}" in texts[0]
    assert "worker 2 does not reach" not in texts[0]


def test_one_that_is_busy_is_asked_again(servers):
    class Busy(WorkerStatus):
        questions = 0

        def answer(self, question):
            self.questions += 1
            if self.questions == 1:
                time.sleep(1.0)
            return super().answer(question)

    busy = Busy()
    server = StatusServer("127.0.0.1", busy, "x")
    ports = [server.port, servers[0].port]
    assert introduced(ports, timeout=0.2) == [tuple(f"127.0.0.1:{port}" for port in ports)] * 2
    assert busy.questions > 1
    server.close()


def test_one_that_does_not_introduce_itself_is_named(servers):
    texts = introduced([server.port for server in servers], 0.2, absent=(1,))
    assert "within 0.2 s. Received: nothing from worker 1, asked for at worker 0." in texts[0]
