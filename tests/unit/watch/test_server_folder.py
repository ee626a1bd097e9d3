"""A job that is read from the servers that train for it."""

import json

import pytest
from tests.unit.standalone.test_agent import ME, Server

from unisono._errors import ClusterError
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.watch import _server_folder
from unisono.watch._job_reader import JobReader
from unisono.watch._server_folder import JoinedFolder, ServerFolder

NOW = 1_900_000_000.0


class Client:
    """Asks an agent without sockets; counts the requests."""

    def __init__(self, agent):
        self.agent, self.asked, self.is_there = agent, 0, True

    def call(self, frame, timeout):
        self.asked += 1
        if not self.is_there:
            raise ClusterError("it does not answer")
        return self.agent.handle(ME, frame)


def line(step):
    return json.dumps(
        {"event": "steps", "from": NOW + step - 1, "until": NOW + step, "generation": 0, "step": step}
        | {"count": 1, "data": None, "exchange": None}
    )


@pytest.fixture
def servers(tmp_path, tuned):
    """Two servers, on each of which a task of one job has made steps; their clients and files."""
    tuned(_server_folder, _FRESH_SECONDS=0.0)
    clients, files = [], []
    for i in range(2):
        (tmp_path / f"{i}").mkdir()
        server = Server(tmp_path / f"{i}")
        server.hello()
        files.append(tmp_path / f"{i}" / "one" / "events" / f"worker-{i}.jsonl")
        files[-1].write_text(line(1) + "\n")
        clients.append(Client(server.agent))
    return clients, files


def test_each_task_is_read_from_its_own_server_and_each_byte_once(servers):
    clients, files = servers
    reader = JobReader(
        JoinedFolder([ServerFolder(f"host{i}:2222", c) for i, c in enumerate(clients)]), lambda: NOW + 3
    )
    job = reader.refresh()
    assert (job.title, job.state) == ("host0:2222, host1:2222", "runs")
    assert [(task.name, task.step) for task in job.tasks] == [("worker:0", 1), ("worker:1", 1)]
    with files[1].open("a") as file:
        file.write(line(2) + "\n")
    before = reader.bytes_read
    assert [task.step for task in reader.refresh().tasks] == [1, 2]
    assert reader.bytes_read - before == len(line(2)) + 1
    # A server that is lost leaves what is known.
    clients[0].is_there = False
    assert [task.step for task in reader.refresh().tasks] == [1, 2]


def test_a_server_that_does_not_answer_at_first_is_an_error(servers):
    clients, _ = servers
    clients[0].is_there = False
    with pytest.raises(ClusterError, match="does not answer"):
        ServerFolder("host0:2222", clients[0])


@pytest.mark.parametrize("meta", [{"folder": ".."}, {"name": "a/b.py", "offset": 0}, {"name": "/etc/x"}])
def test_what_is_no_event_is_not_shown(servers, meta):
    clients, _ = servers
    assert clients[0].call(Frame(Op.STATUS, 1, meta=meta), 1.0).op is Op.ERROR
