"""The cluster of a Slurm job step: every `srun` task is one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, MutableMapping

from unisono._errors import InvalidArgumentError
from unisono._system._environ import process_environ
from unisono.cluster_resolver._base import ClusterResolver
from unisono.cluster_resolver._mpi import is_mpi_rank, read_rank
from unisono.cluster_resolver._slurm_hostlist import expand_counts, expand_hosts
from unisono.cluster_resolver._spec import ClusterSpec, read_index, with_port

#: Outside a step, as after `mpirun` in a job, only the job's variables are set:
#: https://slurm.schedmd.com/srun.html
_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


def is_slurm_step(environ: Mapping[str, str]) -> bool:
    """Return whether `srun` started this process beside others.

    In a batch script, which runs once, the variables of the step are absent.
    """
    # A batch script has SLURM_PROCID, too; a step of one task is also an interactive shell.
    step = {"SLURM_PROCID", "SLURM_STEP_NODELIST"} <= set(environ)
    return step and environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def started_by_mpirun(environ: Mapping[str, str]) -> bool:
    """Return whether `mpirun` started this process inside a Slurm job.

    It starts its daemons with `srun`, and the ranks inherit the daemons' Slurm variables.
    """
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    step = tuple(read_index(environ.get(name, "")) for name in names)
    # Under `srun --mpi=pmi2` the two agree, and Slurm knows more: hosts, tasks and GPUs.
    return is_mpi_rank(environ) and read_rank(environ) != step


@dataclasses.dataclass(frozen=True)
class SlurmStep:
    """Where the tasks of a step run: task 0, 1, … on the first node, then the next node's."""

    rank: int
    hosts: tuple[str, ...]
    tasks: tuple[int, ...]

    @property
    def local_rank(self) -> int:
        """This task's number on its node."""
        return self.rank - sum(self.tasks[: self.node])

    @property
    def node(self) -> int:
        """The number of this task's node."""
        ends = (sum(self.tasks[: n + 1]) for n in range(len(self.tasks)))
        return next(n for n, end in enumerate(ends) if self.rank < end)

    def addresses(self, port_base: int) -> list[str]:
        """Return every task's address; the tasks of a node get ports from `port_base`."""
        nodes = zip(self.hosts, self.tasks, strict=True)
        return [with_port(host, port_base + local) for host, count in nodes for local in range(count)]


def read_slurm(
    environ: Mapping[str, str], tasks_per_node: int | Mapping[str, int] | None = None
) -> SlurmStep:
    """Return where the tasks of the step run.

    Args:
        environ: the variables that `srun` sets.
        tasks_per_node: instead of Slurm's own: a count for every node, or node -> count.
    """
    rank = _integer(environ, ("SLURM_PROCID",))
    if isinstance(tasks_per_node, Mapping):
        hosts, tasks = tuple(tasks_per_node), tuple(tasks_per_node.values())
    else:
        hosts = tuple(expand_hosts(_variable(environ, _NODES)))
        tasks = _counts(environ) if tasks_per_node is None else (tasks_per_node,) * len(hosts)
    expected = _integer(environ, _NUM_TASKS)
    # Otherwise the tasks would compute different addresses, and wait for each other until the time is over.
    if len(tasks) != len(hosts) or sum(tasks) != expected or not 0 <= rank < expected:
        raise InvalidArgumentError(
            "The tasks on all nodes must be the tasks of the step. Received: "
            f"{expected} tasks, nodes {list(hosts)}, tasks per node {list(tasks)}, SLURM_PROCID={rank}. "
            "Start the program with `srun --ntasks-per-node=N`, or pass `tasks_per_node=N`."
        )
    step = SlurmStep(rank, hosts, tasks)
    _require_blocks(environ, step)
    return step


def _counts(environ: Mapping[str, str]) -> tuple[int, ...]:
    return tuple(expand_counts(_variable(environ, _TASKS_PER_NODE)))


def _variable(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    for name in names:
        if name in environ:
            return environ[name]
    known = sorted(name for name in environ if name.startswith("SLURM_"))
    raise InvalidArgumentError(
        f"Slurm must describe the job step in {names[0]}. Received: the Slurm variables {known}. "
        "Start the program with `srun python train.py` inside the job."
    )


def _integer(environ: Mapping[str, str], names: tuple[str, ...]) -> int:
    text = _variable(environ, names)
    number = read_index(text)
    if number is None:
        raise InvalidArgumentError(
            f"{names[0]} must be an integer from 0. Received: {text!r}. Start the program with `srun`."
        )
    return number


def _require_blocks(environ: Mapping[str, str], step: SlurmStep) -> None:
    """A task's number determines its node only where Slurm fills one node after the other."""
    place = read_index(environ.get("SLURM_NODEID", "")), read_index(environ.get("SLURM_LOCALID", ""))
    # Where a variable is absent there is nothing to compare with.
    if None not in place and place != (step.node, step.local_rank):
        raise InvalidArgumentError(
            "Tasks must be given to the nodes in blocks. "
            f"Received: SLURM_PROCID={step.rank} with SLURM_NODEID={place[0]}, SLURM_LOCALID={place[1]}. "
            "Write `srun --distribution=block python train.py`."
        )


def gpu_share(visible: str | None, gpus_per_node: int, gpus_per_task: int, local_rank: int) -> str | None:
    """Return a task's own part of its node's GPUs.

    Args:
        visible: CUDA_VISIBLE_DEVICES as it is, None where it is not set.
        gpus_per_node: how many GPUs the node has; 0 where that is not known.
        gpus_per_task: how many of them each task gets.

    Returns:
        What CUDA_VISIBLE_DEVICES must be; None to leave it as it is.

    >>> gpu_share(None, 4, 2, 1), gpu_share("4,5,6,7", 4, 2, 1), gpu_share("6,7", 4, 2, 1)
    ('2,3', '6,7', '6,7')
    """
    if not gpus_per_node:
        return None
    every = list(map(str, range(gpus_per_node))) if visible is None else [v for v in visible.split(",") if v]
    if len(every) == gpus_per_task:  # Slurm itself bound the GPUs to tasks, or this is the second call
        return ",".join(every)
    # A part of the node's GPUs that is not this task's: which of them are its own cannot be known.
    if len(every) < gpus_per_node:
        raise InvalidArgumentError(
            f"A task must see its node's {gpus_per_node} GPUs, or its own {gpus_per_task}. "
            f"Received: CUDA_VISIBLE_DEVICES={visible!r}. "
            f"Pass `gpus_per_task={len(every)}`, or `auto_set_gpu=False` to leave the variable as it is."
        )
    return ",".join(every[local_rank * gpus_per_task : (local_rank + 1) * gpus_per_task])


class SlurmClusterResolver(ClusterResolver):
    """The tasks of the Slurm job step that this process belongs to.

    It reads SLURM_PROCID, SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE, SLURM_STEP_NUM_TASKS and
    SLURM_GPUS_ON_NODE once. Make it before JAX starts, for CUDA reads its variable only then.

    Args:
        jobs: job -> how many tasks, in the order of the task numbers; all are workers by default.
        port_base: the port of a node's first task; the next ones have the next ports.
        gpus_per_node: how many GPUs each node has; Slurm's number by default.
        gpus_per_task: how many each task gets; an even share by default.
        tasks_per_node: instead of Slurm's: a count for every node, or node -> count.
        auto_set_gpu: whether to set CUDA_VISIBLE_DEVICES to `visible_gpus`.
        rpc_layer: the protocol before addresses.
        environ: read and set this instead of the process' environment.

    Raises:
        InvalidArgumentError: outside a job step, or when tasks or GPUs are not as many as asked for.

    >>> resolver = SlurmClusterResolver(environ={"SLURM_PROCID": "2", "SLURM_STEP_NODELIST": "n[1-2]",
    ...     "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NUM_TASKS": "4", "SLURM_GPUS_ON_NODE": "8"})
    >>> resolver.cluster_spec()
    ClusterSpec({'worker': ['n1:8888', 'n1:8889', 'n2:8888', 'n2:8889']})
    >>> resolver.get_task_info(), resolver.visible_gpus
    (('worker', 2), '0,1,2,3')
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,  # TensorFlow's default
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
        environ: MutableMapping[str, str] | None = None,
    ) -> None:
        environ = process_environ() if environ is None else environ
        step = read_slurm(environ, tasks_per_node)
        self.rpc_layer = rpc_layer
        self._spec, self.task_type, self.task_id = _assign(jobs, step, port_base)
        self._node_gpus, self._gpus = _gpu_counts(environ, step, gpus_per_node, gpus_per_task)
        self._local_rank = step.local_rank
        # As it was before the next lines change it, so that `visible_gpus` stays the same.
        self._visible = environ.get("CUDA_VISIBLE_DEVICES")
        if auto_set_gpu and self.visible_gpus is not None:
            environ["CUDA_VISIBLE_DEVICES"] = self.visible_gpus

    @classmethod
    def detect(cls, environ: MutableMapping[str, str]) -> SlurmClusterResolver | None:
        """Return a resolver in a job step of several tasks that `mpirun` did not start."""
        if is_slurm_step(environ) and not started_by_mpirun(environ):
            return cls(environ=environ)
        return None

    @property
    def visible_gpus(self) -> str | None:
        """CUDA_VISIBLE_DEVICES of this task; None where the number of GPUs is not known.

        Raises:
            InvalidArgumentError: when fewer GPUs are visible than this task must get.
        """
        share = gpu_share(self._visible, self._node_gpus, self._gpus, self._local_rank)
        return self._visible if share is None else share

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster of the job step."""
        return self._spec

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return this task's job and its index in it."""
        return self.task_type, self.task_id

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return how many GPUs every task has; where Slurm does not say, what JAX finds on this machine."""
        return {"GPU": self._gpus} if self._gpus else super().num_accelerators(task_type, task_id)


def _assign(jobs: Mapping[str, int] | None, step: SlurmStep, port_base: int) -> tuple[ClusterSpec, str, int]:
    addresses = step.addresses(port_base)
    jobs = {"worker": len(addresses)} if jobs is None else jobs
    if sum(jobs.values()) != len(addresses) or any(count < 0 for count in jobs.values()):
        raise InvalidArgumentError(
            f"The jobs must have as many tasks as the step. Received: jobs={dict(jobs)} for "
            f"{len(addresses)} tasks. Write `srun --ntasks={sum(jobs.values())}`, or change `jobs`."
        )
    cluster, own = {}, ("worker", 0)
    start = 0
    for job, count in jobs.items():
        cluster[job] = addresses[start : start + count]
        if start <= step.rank < start + count:
            own = job, step.rank - start
        start += count
    return ClusterSpec(cluster), *own


def _gpu_counts(
    environ: Mapping[str, str], step: SlurmStep, per_node: int | None, per_task: int | None
) -> tuple[int, int]:
    """How many GPUs a node has and a task gets; 0 where that is not known."""
    # The fullest node decides: every task gets the same number.
    most = max(step.tasks)
    if per_node is None:
        per_node = _gpus_on_node(environ)
    known = per_node > 0
    if per_task is None:
        per_task = per_node // most
        enough = per_task > 0 or not known
    else:
        enough = 0 <= per_task * most <= per_node
    if not enough or per_node < 0:
        raise InvalidArgumentError(
            "A node must have GPUs for all its tasks. "
            f"Received: {per_node} GPUs for {most} tasks with gpus_per_task={per_task}. Start fewer tasks "
            "(`srun --ntasks-per-node`), ask for more GPUs (`--gpus-per-node`), or pass `gpus_per_task=0`."
        )
    return per_node, per_task


def _gpus_on_node(environ: Mapping[str, str]) -> int:
    # Slurm writes "4"; some sites' prologs write "a100:4".
    return read_index(environ.get("SLURM_GPUS_ON_NODE", "0").rpartition(":")[2]) or 0
