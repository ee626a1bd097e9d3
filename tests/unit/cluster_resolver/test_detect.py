"""Which of the registered resolvers is chosen, and how one is registered."""

import json
import subprocess
import sys
from types import ModuleType

import pytest

from unisono import cluster_resolver
from unisono.cluster_resolver import (
    JaxClusterResolver,
    MPIClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    _detect,
    resolve,
)

OMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}
JAX = {"JAX_COORDINATOR_ADDRESS": "c:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
PET = {"PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "29500", "PET_NNODES": "2", "PET_NODE_RANK": "1"}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NUM_TASKS": "2",
}
TF_CONFIG = {
    "TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}})
}


class Ranks:
    """What mpi4py's communicator does, of three ranks on two hosts."""

    def allgather(self, sendobj):
        return ["a", sendobj, sendobj]


@pytest.mark.parametrize(
    ("environ", "chosen"),
    [
        ({}, type(None)),
        ({"TF_CONFIG": " "}, type(None)),
        ({**TF_CONFIG, **SLURM, **OMPI, **JAX}, TFConfigClusterResolver),
        ({**SLURM, **JAX}, SlurmClusterResolver),
        # `srun --mpi=pmi2` sets PMI's variables too.
        ({**SLURM, "PMI_RANK": "1", "PMI_SIZE": "2"}, SlurmClusterResolver),
        # A shell in a step of one task, and a batch script.
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", **JAX}, JaxClusterResolver),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, type(None)),
        ({**OMPI, **JAX}, MPIClusterResolver),
        # The daemons of `mpirun` are a Slurm step.
        ({**SLURM, **OMPI}, MPIClusterResolver),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, type(None)),
        (JAX, JaxClusterResolver),
        (PET, JaxClusterResolver),
        ({"PET_NNODES": "2"}, type(None)),
    ],
)
def test_which_resolver_is_chosen(monkeypatch, environ, chosen):
    installed = ModuleType("mpi4py.MPI")
    installed.COMM_WORLD = Ranks()
    monkeypatch.setitem(sys.modules, "mpi4py", ModuleType("mpi4py"))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", installed)
    before = dict(environ)
    assert type(resolve(environ)) is chosen
    assert environ == before


def test_the_process_environment_is_asked(monkeypatch):
    for name in (*SLURM, *OMPI, *JAX, *PET, *TF_CONFIG, "PMI_RANK", "MV2_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert resolve() is None
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG["TF_CONFIG"])
    assert resolve().process_id == 0


OURS = """
from unisono.cluster_resolver import ClusterResolver, ClusterSpec


class OursClusterResolver(ClusterResolver):
    def __init__(self, hosts):
        self._hosts = hosts
        self.task_type, self.task_id = "worker", 0

    @classmethod
    def detect(cls, environ):
        return cls(environ["OUR_HOSTS"].split()) if "OUR_HOSTS" in environ else None

    def cluster_spec(self):
        return ClusterSpec({"worker": [f"{host}:2222" for host in self._hosts]})
"""


def test_a_file_and_a_line_make_a_resolver(monkeypatch, tmp_path):
    """As docs/clusters.md describes it. The public name is another line, in `__init__.pyi`."""
    (tmp_path / "_ours.py").write_text(OURS)
    monkeypatch.setattr(cluster_resolver, "__path__", [*cluster_resolver.__path__, str(tmp_path)])
    assert resolve({"OUR_HOSTS": "a b"}) is None
    monkeypatch.setitem(_detect.DETECTED, "OursClusterResolver", "_ours")
    try:
        found = resolve({"OUR_HOSTS": "a b"})
        assert found.cluster_spec() == {"worker": ["a:2222", "b:2222"]}
        assert (found.coordinator_address, found.num_processes, found.process_id) == ("a:2222", 2, 0)
        assert type(found).__name__ == "OursClusterResolver"
        # Those before it in the table win, and it leaves other environments alone.
        assert type(resolve({**JAX, "OUR_HOSTS": "a b"})) is JaxClusterResolver
        assert resolve({}) is None
    finally:
        sys.modules.pop("unisono.cluster_resolver._ours", None)
        vars(cluster_resolver).pop("_ours", None)


def test_clusters_are_read_before_jax_is_imported():
    """Launchers and checks of a start-up read them, and Slurm's GPUs are chosen before JAX starts."""
    code = (
        "import sys; from unisono.cluster_resolver import resolve; resolve({}); "
        "print({'jax', 'keras', 'numpy'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
