"""`unisono.Server`: which tasks it may be, and its end. Its service is tested with processes."""

import os

import pytest
from tests.support import LIMIT

import unisono
from unisono.cluster_resolver._spec import Task
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.rpc._transport._client import RpcClient
from unisono.rpc._transport._local import free_port


@pytest.fixture(autouse=True)
def flags_as_before(monkeypatch):
    # A parameter server that is the first to use XLA in its process gives it options.
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))


def cluster():
    return {job: [f"localhost:{free_port()}"] for job in ("chief", "worker", "ps")}


@pytest.mark.parametrize("job", ["worker", "ps"])
@pytest.mark.parametrize("code", [0, 3])
def test_a_server_serves_until_the_chief_ends_the_job(job, code):
    spec = cluster()
    server = unisono.Server(spec, job_name=job, task_index=0)
    assert server.target == f"zmq://{spec[job][0]}"
    rpc_client = RpcClient(Task(job, 0), spec[job][0])
    assert rpc_client.call(Frame(Op.END, 1, meta={"code": code}), timeout=LIMIT).op is Op.OK
    rpc_client.close()
    if code:
        with pytest.raises(unisono.ClusterError, match="the exit code 3 of its chief"):
            server.join()
    else:
        server.join()


def test_a_server_that_was_not_started():
    server = unisono.Server(cluster(), "ps", start=False)
    with pytest.raises(unisono.ClusterError, match="`join` before `start`"):
        server.join()


@pytest.mark.parametrize(("job", "message"), [("chief", "is the chief"), ("master", "Received: master:0")])
def test_tasks_that_do_not_serve(job, message):
    with pytest.raises(unisono.InvalidArgumentError, match=message):
        unisono.Server(cluster(), job)
