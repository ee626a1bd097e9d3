"""Signs that a process which trains alone should train with others: the texts of warnings.

Tests: tests/virtual/training/test_scope_warnings.py, tests/unit/cluster_resolver/test_siblings.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax

from unisono._errors import UnisonoError
from unisono._mesh import jax_runs
from unisono._system._environ import process_environ
from unisono.cluster_resolver._base import TFConfigClusterResolver
from unisono.cluster_resolver._ray import bundles_of_placement_group, ray_train_rank
from unisono.cluster_resolver._spec import ClusterSpec, read_index

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


#: The names of what this process has joined: "servers" once its strategy uses parameter servers.
_joined: set[str] = set()


def servers_joined() -> None:
    """Note that a strategy of this process uses the parameter servers of TF_CONFIG."""
    _joined.add("servers")


def warning_in_tasks(name: str) -> str | None:
    """Return the warning of a strategy of one process in one of several tasks of Slurm, MPI, Ray or the like.

    TF_CONFIG's workers are those that `fit` looks at: an evaluator is right to train alone.
    """
    found = find_tasks(process_environ())
    if found is None or TFConfigClusterResolver.detect(process_environ()):
        return None
    sign, count = found
    return (
        f"{name} has the devices of this process alone, which is one of {count} tasks ({sign}): each of them "
        "trains a model of its own. That is right for a sweep. To train one model together, write\n"
        "    strategy = unisono.MultiWorkerMirroredStrategy()"
    )


def warning_alone(what: str, why: str) -> str | None:
    """Return the warning where TF_CONFIG names other tasks and JAX computes in this process alone."""
    count = workers_named()
    if count > 1 and jax_runs() and jax.process_count() == 1:
        return (
            f"{what} in this process alone, and TF_CONFIG names {count} workers: each runs the whole program "
            f"by itself. {why}. To train together, write\n"
            "    strategy = unisono.MultiWorkerMirroredStrategy()\n"
            "    with strategy.scope():\n        model = ...\n        model.compile(...)"
        )
    if computes_apart_from_servers():
        return (
            f"{what} in this process alone, and TF_CONFIG names {servers_named()} parameter servers: each "
            f"task runs the whole program by itself. {why}. To train with them, write\n"
            "    strategy = unisono.ParameterServerStrategy()\n"
            "    with strategy.scope():\n        model = ...\n        model.compile(...)"
        )
    return None


def computes_apart_from_servers() -> bool:
    """Return whether JAX computes here, and no strategy uses the parameter servers that TF_CONFIG names."""
    return "servers" not in _joined and jax_runs() and servers_named() > 0


def servers_named(environ: Mapping[str, str] | None = None) -> int:
    """Return how many parameter servers this process should use; 0 where it is no chief and no worker.

    >>> cluster = '{"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}'
    >>> servers_named({"TF_CONFIG": f'{{"cluster": {cluster}, "task": {{"type": "chief"}}}}'})
    1
    """
    spec = _cluster_of_trainer(environ)
    return 0 if spec is None or "ps" not in spec.jobs else spec.num_tasks("ps")


def workers_named(environ: Mapping[str, str] | None = None) -> int:
    """Return how many workers should train together with this process; 0 where it is none of them.

    >>> workers_named({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"}}'})
    2
    >>> workers_named({})
    0
    """
    spec = _cluster_of_trainer(environ)
    return 0 if spec is None or "ps" in spec.jobs else spec.num_processes()


def _cluster_of_trainer(environ: Mapping[str, str] | None) -> ClusterSpec | None:
    """Return the cluster of TF_CONFIG where this process is its chief or a worker."""
    resolver = TFConfigClusterResolver(environ=environ)
    try:
        return resolver.cluster_spec() if resolver.task_type in ("chief", "worker") else None
    except UnisonoError:
        # A strategy that reads the same TF_CONFIG raises this error.
        return None
