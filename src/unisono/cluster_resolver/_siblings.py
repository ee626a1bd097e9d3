"""Signs that a process without a cluster is one of several, of which each would train a model of its own."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.cluster_resolver._ray import bundles_of_placement_group, ray_train_rank
from unisono.cluster_resolver._spec import read_index

#: Variables with the number of processes, and how those that a program does not find are connected.
_SIZES = {
    "SLURM_NTASKS": "Start the program with `srun python train.py`",
    "SLURM_NNODES": "Start the program with `srun python train.py`",
    "OMPI_COMM_WORLD_SIZE": "Start it with `mpirun`, which sets the ranks, too",
    "PMI_SIZE": "Start it with `mpirun`, which sets the ranks, too",
    "MV2_COMM_WORLD_SIZE": "Start it with `mpirun`, which sets the ranks, too",
    "JAX_NUM_PROCESSES": "Set JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID, too",
    "PET_NNODES": "Set PET_MASTER_ADDR and PET_NODE_RANK, too",
    "WORLD_SIZE": "Set JAX_COORDINATOR_ADDRESS=$MASTER_ADDR:$MASTER_PORT, JAX_NUM_PROCESSES=$WORLD_SIZE and "
    "JAX_PROCESS_ID=$RANK",
    "VC_WORKER_NUM": "Set TF_CONFIG from Volcano's VC_WORKER_HOSTS and VC_TASK_INDEX",
}
#: The variable with a task's number, and the one with the number of tasks, of what starts several at once.
#: MPI's come first: its ranks inherit the variables of the step of Slurm in which `mpirun` started daemons.
_TASKS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    # Set in a step alone, not in the batch script.
    ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"),
    ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    ("PET_NODE_RANK", "PET_NNODES"),
    ("RANK", "WORLD_SIZE"),
)
#: Variables that pods have which are one of several, of a number that is not known.
_PODS = ("JOB_COMPLETION_INDEX", "JOBSET_NAME", "LWS_GROUP_SIZE", "LEADER_WORKER_SET_NAME")


def find_siblings(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the sign that this process has siblings, and the line to write; None without a sign.

    >>> find_siblings({"SLURM_NTASKS": "4"})
    ('SLURM_NTASKS=4', 'Start the program with `srun python train.py`')
    >>> find_siblings({"SLURM_NTASKS": "1"}) is None
    True
    """
    if (bundles := bundles_of_placement_group()) > 1:
        return (
            f"Ray runs it in a placement group of {bundles} bundles",
            "Ray does not say which of them this is: pass "
            "`unisono.cluster_resolver.RayClusterResolver(rank=…, world_size=…)` to the strategy, or use Ray "
            "Train or `unisono.ray.Trainer`",
        )
    for name, remedy in _SIZES.items():
        if (read_index(environ.get(name)) or 0) > 1:
            return f"{name}={environ[name]}", remedy
    for name in _PODS:
        if name in environ and "KUBERNETES_SERVICE_HOST" in environ:
            return (
                f"{name}={environ[name]}, which Kubernetes sets for pods of a group",
                "Submit it with `unisono launch --on kubernetes`, or set JAX_COORDINATOR_ADDRESS to the "
                "first pod's name and a port, JAX_NUM_PROCESSES and JAX_PROCESS_ID",
            )
    return None


def find_tasks(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the launcher of this process and the number of its tasks; None without several tasks.

    A possible launcher, such as a job of several tasks whose batch script this is, does not count.

    >>> find_tasks({"SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_TASKS": "8"})
    ('SLURM_STEP_NUM_TASKS=8', 8)
    >>> find_tasks({"SLURM_STEP_NODELIST": "node1", "SLURM_STEP_NUM_TASKS": "1"}) is None
    True
    """
    known = ray_train_rank()
    if known is not None:
        return (f"Ray Train has {known[1]} workers", known[1]) if known[1] > 1 else None
    for rank, size in _TASKS:
        if rank in environ:
            count = read_index(environ.get(size)) or 0
            return (f"{size}={count}", count) if count > 1 else None
    return None
