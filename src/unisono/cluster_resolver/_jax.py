"""The cluster that JAX's own variables describe, or Kubeflow Trainer's.

Tests: tests/unit/cluster_resolver/test_launchers.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, MutableMapping

from unisono._errors import InvalidArgumentError
from unisono._system._environ import process_environ
from unisono.cluster_resolver._base import ClusterResolver
from unisono.cluster_resolver._spec import ClusterSpec, address_problem, read_index, with_port

#: Kubeflow Trainer sets the first row for JAX and the second for other frameworks; a pod is a process:
#: https://www.kubeflow.org/docs/components/trainer/user-guides/jax
_NAMES = {
    "address": ("JAX_COORDINATOR_ADDRESS", "PET_MASTER_ADDR"),
    "port": ("JAX_COORDINATOR_PORT", "PET_MASTER_PORT"),
    "num_processes": ("JAX_NUM_PROCESSES", "PET_NNODES"),
    "process_id": ("JAX_PROCESS_ID", "PET_NODE_RANK"),
}
_EXAMPLE = (
    "Set JAX_COORDINATOR_ADDRESS=10.0.0.1:1234 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0, or pass "
    "`JaxClusterResolver('10.0.0.1:1234', num_processes=2, process_id=0)`."
)


def is_jax_process(environ: Mapping[str, str]) -> bool:
    """Return whether the environment has the coordinator's address."""
    return "JAX_COORDINATOR_ADDRESS" in environ or {"PET_MASTER_ADDR", "PET_NNODES"} <= set(environ)


@dataclasses.dataclass(frozen=True)
class JaxCluster:
    """A cluster, as JAX's processes know it.

    Args:
        coordinator_address: process 0's `"host:port"`.
    """

    coordinator_address: str
    num_processes: int
    process_id: int


def read_cluster(
    environ: Mapping[str, str],
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> JaxCluster:
    """Return the coordinator's address, the number of processes and this one's.

    Args:
        environ: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or else PET_MASTER_ADDR,
            PET_MASTER_PORT, PET_NNODES and PET_NODE_RANK.

    >>> read_cluster({"PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "29500", "PET_NNODES": "2"}, process_id=1)
    JaxCluster(coordinator_address='a:29500', num_processes=2, process_id=1)
    """
    # The variables of one launcher, not a mixture: the other's may be left over from an outer job.
    row = 0 if "JAX_COORDINATOR_ADDRESS" in environ or "PET_MASTER_ADDR" not in environ else 1
    text = {key: environ.get(names[row]) for key, names in _NAMES.items()}
    address = coordinator_address or _address(text["address"], text["port"])
    count = read_index(text["num_processes"] if num_processes is None else num_processes)
    number = read_index(text["process_id"] if process_id is None else process_id)
    problem = address_problem(address)
    if problem:
        problem = f"the coordinator's address must be 'host:port' ({problem})"
    elif not count:
        problem = "there must be a number of processes"
    elif number is None or number >= count:
        problem = f"the process' number must be from 0 to {count - 1}"
    else:
        return JaxCluster(str(address), count, number)
    read = {names[row]: environ[names[row]] for names in _NAMES.values() if names[row] in environ}
    arguments = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    arguments = {name: value for name, value in arguments.items() if value is not None}
    raise InvalidArgumentError(
        f"JAX's processes must know their cluster: {problem}. "
        f"Received: variables {read}, arguments {arguments}. {_EXAMPLE}"
    )


def _address(host: str | None, port: str | None) -> str | None:
    """The address with its port, which `host` may already contain."""
    number = None if port is None else read_index(port)
    # JAX_COORDINATOR_ADDRESS usually contains the port, PET_MASTER_ADDR does not.
    if host is None or number is None or address_problem(host) is None:
        return host
    return with_port(host, number)


class JaxClusterResolver(ClusterResolver):
    """The processes of JAX's own variables, or of Kubeflow Trainer's, read once.

    They contain process 0's address and the number of processes only: `cluster_spec` has one task, and
    `coordinator_address`, `num_processes` and `process_id` have the rest.

    Args:
        coordinator_address: process 0's `"host:port"`, instead of JAX_COORDINATOR_ADDRESS.
        num_processes: how many processes there are, instead of JAX_NUM_PROCESSES.
        process_id: this process' number, instead of JAX_PROCESS_ID.
        environ: read this instead of the process' environment.

    Raises:
        InvalidArgumentError: when one of the three is absent or cannot be used.

    >>> resolver = JaxClusterResolver("10.0.0.1:1234", num_processes=2, process_id=1)
    >>> resolver.cluster_spec(), resolver.num_processes, resolver.task
    (ClusterSpec({'worker': ['10.0.0.1:1234']}), 2, Task(type='worker', index=1))
    """

    def __init__(
        self,
        coordinator_address: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        environ = process_environ() if environ is None else environ
        self._cluster = read_cluster(environ, coordinator_address, num_processes, process_id)
        self.task_type, self.task_id = "worker", self._cluster.process_id

    @classmethod
    def detect(cls, environ: MutableMapping[str, str]) -> JaxClusterResolver | None:
        """Return a resolver when the variables have the coordinator's address."""
        return cls(environ=environ) if is_jax_process(environ) else None

    def cluster_spec(self) -> ClusterSpec:
        """Return process 0's address; the others' are not known."""
        return ClusterSpec({"worker": [self._cluster.coordinator_address]})

    @property
    def coordinator_address(self) -> str:
        """The address of process 0, to which the others connect."""
        return self._cluster.coordinator_address

    @property
    def num_processes(self) -> int:
        """How many processes compute together."""
        return self._cluster.num_processes

    @property
    def process_id(self) -> int:
        """This process' number."""
        return self._cluster.process_id
