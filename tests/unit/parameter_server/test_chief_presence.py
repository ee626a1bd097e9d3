"""The chief's signs of life, and what it leaves for tasks that are away when the job ends."""

import os
import threading
import time

import pytest
from tests.support import LIMIT

from unisono._errors import ClusterError
from unisono.cluster_resolver._spec import Task
from unisono.parameter_server.server import _chief_presence
from unisono.parameter_server.server._chief_presence import ChiefHeartbeats, end_marker_of, leave_end_marker
from unisono.rpc._loopback import LoopbackNetwork
from unisono.rpc._ops import Op
from unisono.rpc._transport import _local


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(_chief_presence, "socket_directory", lambda: _local.socket_directory(str(tmp_path)))
    return _local.socket_directory(str(tmp_path))


def test_a_task_that_was_starting_when_the_job_ended_finds_its_code(directory):
    began = time.time() - 5
    # No file can be left on another machine.
    assert leave_end_marker(["localhost:2222", "10.0.0.1:2222"], 3) == {"localhost:2222"}
    assert end_marker_of("localhost:2223", began) is None
    assert end_marker_of("127.0.0.1:2222", began) == 3
    # It is read once.
    assert end_marker_of("127.0.0.1:2222", began) is None
    assert list(directory.iterdir()) == []


def test_a_task_that_was_started_later_belongs_to_the_next_job(directory):
    leave_end_marker(["localhost:2222"], 0)
    assert end_marker_of("localhost:2222", time.time() + 1) is None


def test_words_that_are_never_read_are_removed(directory):
    leave_end_marker(["localhost:2222"], 0)
    (old,) = directory.iterdir()
    os.utime(old, (1.0, 1.0))
    leave_end_marker(["localhost:2223"], 0)
    assert [path.name for path in directory.iterdir()] == ["127.0.0.1-2223.ended"]


def test_all_tasks_get_signs_also_where_one_is_away():
    network, got = LoopbackNetwork(), [threading.Event(), threading.Event()]

    class Away:
        def send(self, frame, timeout):
            raise ClusterError("it was closed")

    def handler(event):
        def handle(client, frame):
            if (frame.op, frame.generation) == (Op.HEARTBEAT, 7):
                event.set()
            return frame.answer(Op.OK)

        return handle

    for i, event in enumerate(got):
        network.rpc_server(str(i), handler(event)).start()
    rpc_clients = [network.rpc_client(Task("ps", i), str(i)) for i in range(2)]
    heartbeats = ChiefHeartbeats([Away(), *rpc_clients], 7, every=0.01)
    assert all(event.wait(LIMIT) for event in got)
    heartbeats.close()
    heartbeats._thread.join(LIMIT)
    assert not heartbeats._thread.is_alive()
