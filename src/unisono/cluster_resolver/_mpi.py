"""The cluster of an MPI job: every rank is one process.

Tests: tests/unit/cluster_resolver/test_launchers.py.
"""

from __future__ import annotations

import collections
import importlib
import platform
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Protocol

from unisono._errors import BackendError, InvalidArgumentError
from unisono._system._environ import process_environ
from unisono.cluster_resolver._base import ClusterResolver
from unisono.cluster_resolver._slurm_hostlist import expand_hosts
from unisono.cluster_resolver._spec import ClusterSpec, read_index, with_port

#: Rank and size, as Open MPI, MPICH and Intel MPI, and MVAPICH2 name them.
_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
)

#: How many ranks are on this rank's machine, as the same three name it.
_LOCAL = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")


class Communicator(Protocol):
    """The part of an `mpi4py.MPI.Comm` that the resolver uses."""

    def Get_rank(self) -> int: ...  # noqa: N802 (MPI's names)

    def Get_size(self) -> int: ...  # noqa: N802

    def allgather(self, sendobj: str) -> list[str]: ...


def is_mpi_rank(environ: Mapping[str, str]) -> bool:
    """Return whether `mpirun` started this process beside others."""
    # One rank alone does not count: an interactive shell may be one, too.
    return any(rank in environ and environ.get(size, "1") != "1" for rank, size in _VARIABLES)


def read_rank(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return this process' rank, and how many ranks there are.

    >>> read_rank({"PMI_RANK": "1", "PMI_SIZE": "4"})
    (1, 4)
    """
    for names in _VARIABLES:
        if names[0] in environ:
            values = [environ.get(name, "") for name in names]
            rank, size = map(read_index, values)
            if rank is not None and size is not None and rank < size:
                return rank, size
            raise InvalidArgumentError(
                f"{names[0]} must be a rank below {names[1]}. Received: {values[0]!r} and {values[1]!r}. "
                "Start the program with `mpirun -n 2 python train.py`."
            )
    raise InvalidArgumentError(
        f"MPI must set this process' rank in one of {', '.join(rank for rank, _ in _VARIABLES)}. "
        "Received: none of them. Start the program with `mpirun -n 2 python train.py`."
    )


def mpi_addresses(hosts: Sequence[str], port_base: int) -> list[str]:
    """Return each rank's address; the ranks of a host get ports from `port_base`.

    >>> mpi_addresses(["a", "b", "a"], 8888)
    ['a:8888', 'b:8888', 'a:8889']
    """
    used: collections.Counter[str] = collections.Counter()
    addresses = []
    for host in hosts:
        # By host and not by rank: ranks need not lie on the hosts in blocks.
        addresses.append(with_port(host, port_base + used[host]))
        used[host] += 1
    return addresses


def end_mpi() -> None:
    """End MPI in this process, where a resolver has begun it.

    `mpirun` takes it for a failure when a process ends that has begun MPI and not ended it, as a program does
    that this process becomes.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


class MPIClusterResolver(ClusterResolver):
    """The ranks of an MPI job, all of them workers.

    The variables of `mpirun` hold rank and size but not the other hosts. They are given, or gathered through
    mpi4py when the resolver is made, which all ranks must do then; on one machine neither is needed.

    Args:
        hosts: one per rank: a list, or a text such as `"node[1-2]"`.
        port_base: the port of a host's first rank; the next ones have the next ports.
        rpc_layer: the protocol before addresses.
        communicator: an `mpi4py.MPI.Comm` instead of `COMM_WORLD`; it also gives rank and size.
        environ: read this instead of the process' environment.

    Raises:
        InvalidArgumentError: outside an MPI job, or when there are not as many hosts as ranks.
        BackendError: on several machines, when hosts are neither given nor mpi4py installed.

    >>> environ = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    >>> resolver = MPIClusterResolver("node[1-2]", environ=environ)
    >>> resolver.cluster_spec(), resolver.task_id
    (ClusterSpec({'worker': ['node1:8888', 'node2:8888']}), 1)
    """

    def __init__(
        self,
        hosts: str | Sequence[str] | None = None,
        port_base: int = 8888,
        rpc_layer: str | None = "grpc",
        communicator: Communicator | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        environ = process_environ() if environ is None else environ
        if communicator is None:
            rank, size = read_rank(environ)
        else:
            rank, size = communicator.Get_rank(), communicator.Get_size()
        if hosts is None and communicator is None and _is_one_machine(environ, size):
            hosts = ["127.0.0.1"] * size
        if hosts is None:
            # A collective of all ranks, which also puts the hosts into the order of the ranks.
            hosts = (communicator or _world()).allgather(platform.node())
        every = expand_hosts(hosts) if isinstance(hosts, str) else list(hosts)
        if len(every) != size:
            raise InvalidArgumentError(
                f"There must be one host per rank. Received: {len(every)} hosts for {size} ranks, "
                f"{every[:10]}. Write a host as often as it has ranks: `hosts=['node1', 'node1', 'node2']`."
            )
        self.task_type, self.task_id, self.rpc_layer = "worker", rank, rpc_layer
        self._spec = ClusterSpec({"worker": mpi_addresses(every, port_base)})

    @classmethod
    def detect(cls, environ: MutableMapping[str, str]) -> MPIClusterResolver | None:
        """Return a resolver in an MPI job of several ranks."""
        return cls(environ=environ) if is_mpi_rank(environ) else None

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all ranks."""
        return self._spec


def _is_one_machine(environ: Mapping[str, str], ranks: int) -> bool:
    return any(environ.get(name) == str(ranks) for name in _LOCAL)


def _world() -> Communicator:
    try:
        world: Communicator = importlib.import_module("mpi4py.MPI").COMM_WORLD
    except (
        ImportError,
        RuntimeError,
    ) as error:  # RuntimeError: mpi4py is installed, and MPI's library is not
        raise BackendError(
            f"The ranks must gather their hosts through mpi4py. Received: {error}. Install "
            "`unisono[mpi]`, or write `MPIClusterResolver(hosts=['node1', 'node2'])`, or set TF_CONFIG."
        ) from error
    return world
