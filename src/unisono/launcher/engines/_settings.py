"""The flags of `unisono launch` for each engine: one record per engine.

Tests: tests/unit/launcher/engines/test_engine_flags.py.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated

from unisono._errors import InvalidArgumentError

#: The folder below the current one for logs without `--log-dir`, where other machines find it.
LOGS = "unisono-logs"
_HOST = re.compile(r"(\S+?)(?:\s+slots\s*=\s*([0-9]{1,5}))?(?:\s+max[_-]slots\s*=\s*[0-9]+)?")


@dataclasses.dataclass(frozen=True)
class Flag:
    """The flag of a field: its name is the field's, with hyphens.

    Args:
        help: one line for `unisono launch --help`.
        short: a second name, such as `-N`.
    """

    help: str
    short: str = ""


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """The settings of one engine. Each field is a flag: its type is a number, a text or several, or a bool.

    A field's default is what it has without its flag: None, False or ().
    """

    def default_workers(self, others: int) -> int:
        """Return the number of workers without `-n`.

        Args:
            others: the number of tasks of other jobs: chief, parameter servers and evaluator.
        """
        return 1


@dataclasses.dataclass(frozen=True)
class SlurmSettings(EngineSettings):
    """The request of `unisono launch --on slurm`.

    >>> SlurmSettings(nodes=2, gpus_per_node="a100:4").default_workers(others=1)
    7
    """

    nodes: Annotated[int | None, Flag("Number of nodes.", "-N")] = None
    ntasks_per_node: Annotated[
        int | None, Flag("Tasks of each node, at most. [default: one per GPU; without GPUs, one]")
    ] = None
    gpus_per_node: Annotated[str | None, Flag("GPUs of each node: 4, or a100:4.")] = None
    cpus_per_task: Annotated[int | None, Flag("Cores of each task.", "-c")] = None
    partition: Annotated[str | None, Flag("The partition.", "-p")] = None
    time: Annotated[str | None, Flag("The time limit: 4:00:00.", "-t")] = None
    account: Annotated[str | None, Flag("The account.", "-A")] = None
    array: Annotated[
        str | None, Flag("A job for each index: 0-7, 0-7%2. SLURM_ARRAY_TASK_ID has the index.")
    ] = None
    setup: Annotated[
        tuple[str, ...],
        Flag("A line of shell before the tasks: 'module load cuda'; may be repeated."),
    ] = ()
    sbatch: Annotated[
        tuple[str, ...], Flag("A further argument of sbatch, such as --mem=64G; may be repeated.")
    ] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "ntasks_per_node", "cpus_per_task"):
            number = getattr(self, name)
            if number is not None and number < 1:
                flag = "--" + name.replace("_", "-")
                raise InvalidArgumentError(
                    f"`{flag}` must be at least 1. Received: {number}. Write `{flag} 1`."
                )
        if self.gpus_per_node is not None and not re.fullmatch(r"([\w.-]+:)?[0-9]{1,4}", self.gpus_per_node):
            raise InvalidArgumentError(
                "`--gpus-per-node` must be a number, or a kind of GPU and a number. "
                f"Received: {self.gpus_per_node!r}. Write `--gpus-per-node 4` or `--gpus-per-node a100:4`."
            )

    @property
    def tasks_per_node(self) -> int | None:
        """The most tasks of a node; None leaves it to Slurm."""
        gpus = 0 if self.gpus_per_node is None else int(self.gpus_per_node.rpartition(":")[2])
        return self.ntasks_per_node or gpus or None

    def default_workers(self, others: int) -> int:
        """Return how many workers fill the nodes."""
        return max(1, (self.nodes or 1) * (self.tasks_per_node or 1) - others)


@dataclasses.dataclass(frozen=True)
class KubernetesSettings(EngineSettings):
    """The request of `unisono launch --on kubernetes`."""

    image: Annotated[str | None, Flag("The container image, which holds Unisono and the program.")] = None
    kind: Annotated[
        str | None, Flag("What is submitted: job, jobset or trainjob (Kubeflow Trainer). [default: job]")
    ] = None
    name: Annotated[str | None, Flag("Name of the objects. [default: unisono- and the script's]")] = None
    namespace: Annotated[str | None, Flag("The namespace. [default: the context's]")] = None
    resource: Annotated[
        tuple[str, ...],
        Flag(
            "What each task gets, by the engine's names: cpu=4, memory=16Gi, nvidia.com/gpu=1; of Ray "
            "CPU=4, GPU=1; may be repeated."
        ),
    ] = ()
    claim: Annotated[
        str | None, Flag("PersistentVolumeClaim for backups, mounted at /unisono in all tasks.")
    ] = None
    storage: Annotated[str | None, Flag("Create the claim, with this size: 100Gi.")] = None
    topology: Annotated[
        str | None, Flag("Label of nodes: all workers run where it has one value, alone.")
    ] = None
    selector: Annotated[
        tuple[str, ...], Flag("Label that the nodes must have: pool=gpu; may be repeated.")
    ] = ()
    health_port: Annotated[int | None, Flag("Port of the tasks for probes. [default: 2223]")] = None

    def __post_init__(self) -> None:
        if self.health_port is not None and not 1 <= self.health_port <= 65535:
            raise InvalidArgumentError(
                f"`--health-port` must be a port from 1 to 65535. Received: {self.health_port}. Leave it out "
                "for 2223."
            )


@dataclasses.dataclass(frozen=True)
class MpiSettings(EngineSettings):
    """Options of `mpirun` for `unisono launch --on mpi`."""

    hostfile: Annotated[
        str | None, Flag("File with a line 'name slots=4' per host. [default: all tasks on this machine]")
    ] = None
    mpirun: Annotated[
        tuple[str, ...], Flag("A further argument of mpirun, such as --allow-run-as-root; may be repeated.")
    ] = ()

    def default_workers(self, others: int) -> int:
        """Return how many workers fill the slots of the hostfile."""
        return 1 if self.hostfile is None else max(1, len(rank_hosts(self.hostfile)) - others)


@dataclasses.dataclass(frozen=True)
class RaySettings(EngineSettings):
    """The request of `unisono launch --on ray`."""

    address: Annotated[
        str | None,
        Flag("The cluster: 10.0.0.1:6379. [default: RAY_ADDRESS, or the cluster that runs on this machine]"),
    ] = None
    resource: Annotated[tuple[str, ...], Flag("As for Kubernetes.")] = ()
    placement: Annotated[
        str | None, Flag("PACK, SPREAD, STRICT_PACK or STRICT_SPREAD: on which nodes. [default: PACK]")
    ] = None
    runtime_env_json: Annotated[str | None, Flag('Ray\'s runtime_env as JSON: \'{"pip": ["einops"]}\'.')] = (
        None
    )


def rank_hosts(hostfile: str) -> list[str]:
    """Return the hosts of a file of Open MPI, each as often as it has slots."""
    try:
        lines = Path(hostfile).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"The hostfile must be a text file. Received: {hostfile!r} ({error}). Write `--hostfile hosts`."
        ) from None
    hosts: list[str] = []
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        match = _HOST.fullmatch(line)
        if match is None:
            raise InvalidArgumentError(
                f"Each line of a hostfile must be a host and its slots. Received: {line!r} in {hostfile!r}. "
                "Write `node1 slots=4`."
            )
        hosts += [match[1]] * int(match[2] or 1)
    if not hosts:
        raise InvalidArgumentError(
            f"A hostfile must have a line for each host. Received: none in {hostfile!r}. "
            "Write `node1 slots=4`."
        )
    return hosts


#: The engines by name.
ENGINES: dict[str, type[EngineSettings]] = {
    "slurm": SlurmSettings,
    "kubernetes": KubernetesSettings,
    "mpi": MpiSettings,
    "ray": RaySettings,
}

#: The module of each engine, with the functions of `_engine.Engine`. That of Ray is above this package: it is
#: a client of standalone servers.
MODULES = {name: f"unisono.launcher.engines._{name}" for name in ENGINES} | {"ray": "unisono.ray._engine"}
