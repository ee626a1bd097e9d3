"""Clusters of processes: the contract over NCCL, parameter servers with GPUs, and the launcher's GPUs."""

import importlib.metadata

import pytest

from tests.cluster import test_contract, test_parameter_server
from tests.cluster._workers import Workers
from tests.cluster.launch_support import launched
from tests.gpu import machine
from tests.support import PLATFORM

#: NCCL with ranks that share a GPU: https://github.com/NVIDIA/cuDecomp/pull/130 says since when.
SHARING_NCCL = (2, 30)
#: What lets two ranks of NCCL share a GPU, or the instances of one, without waiting for each other's kernels.
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}
#: They count the messages of Gloo's exchange between CPUs.
OF_GLOO = "one_message or travel_with or exchange_once"


def nccl():
    """The version of the package; (0,) without it."""
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            return tuple(map(int, importlib.metadata.version(package).split(".")[:2]))
        except importlib.metadata.PackageNotFoundError:
            continue
    return (0,)


def places(count):
    """The variables that give each of some processes a GPU of its own, or one GPU to all; of CPUs, none."""
    if PLATFORM != "gpu":
        return {}
    there = machine.visible()
    names = [there[i % len(there)] for i in range(count)]
    own = {"CUDA_VISIBLE_DEVICES": names}
    if len(set(names)) == count and not any(name.startswith("MIG-") for name in names):
        return own
    if nccl() < SHARING_NCCL:
        pytest.skip(f"needs {count} GPUs, or NCCL 2.30 for one. Received: {there}, NCCL {nccl()}")
    return own | {name: [value] * count for name, value in SHARED.items()}


# Processes that share a GPU wait for each other's kernels.
@pytest.mark.timeout(1200)
def test_two_processes_keep_the_contract(tmp_path):
    chosen = f"({test_contract.SOME}) and not ({OF_GLOO})" if PLATFORM == "gpu" else test_contract.SOME
    options = ["-p", "no:cacheprovider", "--basetemp", str(tmp_path / "base-{worker}"), "--timeout=400"]
    # What JAX warns of on GPUs is not known yet.
    options += ["-W", "default"] if PLATFORM == "gpu" else []
    command = ["-m", "pytest", "-q", "-x", *options, *test_contract.CONTRACT, "-k", chosen]
    workers = Workers(tmp_path, command, count=2, devices=1, env=places(2))
    assert workers.wait(900) == [0, 0], workers.text()


#: Before the program of the tests of clusters: each task says at its end on which devices JAX has started.
STARTED = """
import atexit
atexit.register(lambda: print("started on", __import__("jax").default_backend(), flush=True))
"""


def test_parameter_servers_beside_devices(tmp_path, monkeypatch):
    """Chief and worker see a GPU, where their own programs run; the step and the servers stay on CPUs."""
    for name, values in places(1).items():
        monkeypatch.setenv(name, values[0])
    script = STARTED + test_parameter_server.SCRIPT.read_text()
    with launched(tmp_path, script, "-n", "1", "--ps", "2", "--chief") as run:
        assert run.end() == 0
        output = run.log("chief:0")
    test_parameter_server.check(output)
    assert f"started on {PLATFORM}" in output
    assert f"started on {PLATFORM}" in run.log("worker:0")
    assert "started on cpu" in run.log("ps:0")


ASKED = """
import jax
print(me, "sees", os.environ["CUDA_VISIBLE_DEVICES"], "as", *[f"{d.platform}:{d.id}" for d in jax.devices()])
"""


def test_the_launcher_gives_each_task_a_device_of_its_own(tmp_path, monkeypatch):
    """On CPU devices the variable alone says so."""
    there = machine.visible()[:2] if PLATFORM == "gpu" else ["3", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(there))
    with launched(tmp_path, ASKED, "-n", "2") as run:
        assert run.end() == 0
        logs = [run.log(f"worker:{i}") for i in range(2)]
    for i, log in enumerate(logs):
        assert f"worker:{i} sees {there[i % len(there)]} as {PLATFORM}:0\n" in log
