"""What clouds set in the environment of two tasks starts a cluster; the hosts are of loopback."""

import json
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.cluster._workers import free_ports
from tests.cluster.launch_support import LIMIT

PROGRAM = Path(__file__).parent / "programs" / "on_a_cloud.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has 127.0.0.2 without a setting")


def sagemaker(port):
    for host in ("127.0.0.1", "127.0.0.2"):
        yield {"SM_HOSTS": '["127.0.0.1", "127.0.0.2"]', "SM_CURRENT_HOST": host, "UNISONO_PORT": str(port)}


def skypilot(port):
    for rank in ("0", "1"):
        nodes = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "SKYPILOT_NUM_NODES": "2"}
        yield nodes | {"SKYPILOT_NODE_RANK": rank, "UNISONO_PORT": str(port)}


def vertex(port):
    pools = {"workerpool0": [f"127.0.0.1:{port}"], "workerpool1": [f"127.0.0.2:{port}"]}
    for pool in pools:
        spec = {"cluster": pools, "environment": "cloud", "task": {"type": pool, "index": 0, "trial": ""}}
        yield {"CLUSTER_SPEC": json.dumps(spec)}


@pytest.mark.parametrize(
    ("environments", "resolver"),
    [
        (sagemaker, "SageMakerClusterResolver"),
        pytest.param(skypilot, "SkyPilotClusterResolver", marks=pytest.mark.exhaustive),
        pytest.param(vertex, "TFConfigClusterResolver", marks=pytest.mark.exhaustive),
    ],
)
def test_two_tasks_find_each_other(tmp_path, environments, resolver):
    [port] = free_ports(1)
    logs, programs = [], []
    try:
        for i, env in enumerate(environments(port)):
            logs.append(tmp_path / f"{i}.log")
            programs.append(forked.Program([str(PROGRAM)], tmp_path, logs[i], env=forked.environment(**env)))
        codes = [program.wait(LIMIT) for program in programs]
    finally:
        for program in programs:
            program.kill()
    texts = [log.read_text() for log in logs]
    assert codes == [0, 0], texts
    for i, text in enumerate(texts):
        assert f"{resolver} worker {i} of 2 sum 21\n" in text, texts
