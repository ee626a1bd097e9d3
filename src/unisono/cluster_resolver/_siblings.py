"""Signs that a process without a cluster is one of several, of which each would train a model of its own.

Tests: tests/unit/cluster_resolver/test_siblings.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from unisono.cluster_resolver._spec import read_index

#: Variables with the number of processes, and how those that a program does not find are connected.
_SIZES = {
    "SLURM_NTASKS": "Start the program with `srun python train.py`",
    "OMPI_COMM_WORLD_SIZE": "Start it with `mpirun`, which sets the ranks, too",
    "PMI_SIZE": "Start it with `mpirun`, which sets the ranks, too",
    "MV2_COMM_WORLD_SIZE": "Start it with `mpirun`, which sets the ranks, too",
    "JAX_NUM_PROCESSES": "Set JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID, too",
    "PET_NNODES": "Set PET_MASTER_ADDR and PET_NODE_RANK, too",
    "WORLD_SIZE": "Set JAX_COORDINATOR_ADDRESS=$MASTER_ADDR:$MASTER_PORT, JAX_NUM_PROCESSES=$WORLD_SIZE and "
    "JAX_PROCESS_ID=$RANK",
    "VC_WORKER_NUM": "Set TF_CONFIG from Volcano's VC_WORKER_HOSTS and VC_TASK_INDEX",
}
#: Variables with a JSON list of the hosts.
_HOSTS = {"SM_HOSTS": "Set TF_CONFIG from SageMaker's SM_HOSTS and SM_CURRENT_HOST"}
#: Variables that pods have which are one of several, of a number that is not known.
_PODS = ("JOB_COMPLETION_INDEX", "JOBSET_NAME", "LWS_GROUP_SIZE", "LEADER_WORKER_SET_NAME")


def find_siblings(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return what shows that this process has siblings, and what to write; None where nothing does.

    >>> find_siblings({"SLURM_NTASKS": "4"})
    ('SLURM_NTASKS=4', 'Start the program with `srun python train.py`')
    >>> find_siblings({"SLURM_NTASKS": "1"}) is None
    True
    """
    if (workers := _ray_workers()) > 1:
        return (
            f"Ray Train runs it as one of {workers} workers",
            "Ray connects JAX's processes on GPUs and TPUs only: set JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID in the training function, as in docs/clusters.md",
        )
    for name, remedy in _SIZES.items():
        if (read_index(environ.get(name)) or 0) > 1:
            return f"{name}={environ[name]}", remedy
    for name, remedy in _HOSTS.items():
        if _length(environ.get(name, "")) > 1:
            return f"{name}={environ[name]}", remedy
    for name in _PODS:
        if name in environ and "KUBERNETES_SERVICE_HOST" in environ:
            return (
                f"{name}={environ[name]}, which Kubernetes sets for pods of a group",
                "Set JAX_COORDINATOR_ADDRESS to the first pod's name and a port, JAX_NUM_PROCESSES and "
                "JAX_PROCESS_ID",
            )
    return None


def _ray_workers() -> int:
    """How many workers Ray Train has, where it runs this process; a program that uses it has imported it."""
    train = sys.modules.get("ray.train")
    if train is None:
        return 0
    try:
        return int(train.get_context().get_world_size())
    except (AttributeError, RuntimeError, TypeError):  # not on a worker
        return 0


def _length(text: str) -> int:
    try:
        hosts = json.loads(text or "[]")
    except ValueError:
        return 0
    return len(hosts) if isinstance(hosts, list) else 0
