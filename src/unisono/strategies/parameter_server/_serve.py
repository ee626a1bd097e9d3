"""What workers and parameter servers do until the chief ends the job.

Tests: tests/cluster/test_parameter_server.py.
"""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from unisono.cluster_resolver._base import process_environ
from unisono.ps._calls import ClientId, Handler, RequestEndpoint, RequestPeer
from unisono.ps._client import ServerClient
from unisono.ps._durable import DurableStore
from unisono.ps._frames import Frame
from unisono.ps._loopback import LoopbackNetwork
from unisono.ps._programs import ExportedProgram
from unisono.ps._server import VariableServer
from unisono.ps._store import VariableStore
from unisono.ps._transport._endpoint import Endpoint
from unisono.ps._transport._keys import read_keys
from unisono.ps._transport._peer import Peer
from unisono.ps.worker._step_worker import StepWorker
from unisono.strategies.parameter_server._roles import Roles

#: The variable with the directory in which parameter servers keep their state; without it, in memory alone.
DIRECTORY_VARIABLE = "UNISONO_PS_DIRECTORY"

_LOG = logging.getLogger("unisono")


def load_program(digest: str, data: bytes) -> ExportedProgram:
    """Return a compiled program of a worker.

    Args:
        digest: of the program.
        data: as `jax.export` has serialized it.
    """
    return ExportedProgram(data)


def serve(roles: Roles) -> int:
    """Serve the chief of a cluster until it ends the job; return the exit code.

    Args:
        roles: of the cluster; this task is a worker or a parameter server.

    Raises:
        ClusterError: when the task cannot listen at its address.
    """
    return service_of(roles).join()


def service_of(roles: Roles) -> Service:
    """Begin to serve the chief of a cluster, in threads.

    Args:
        roles: of the cluster; this task is a worker or a parameter server.

    Raises:
        ClusterError: when the task cannot listen at its address.
    """
    _LOG.info("%s serves at %s", roles.task, roles.addresses[roles.task])
    if roles.task not in roles.workers:
        return _VariableService(roles)
    keys = read_keys(process_environ(), roles.task, roles.spec)
    servers = [Peer(task, roles.addresses[task], keys) for task in roles.servers]
    return WorkerService(roles, servers, lambda handler: Endpoint(roles.addresses[roles.task], handler, keys))


class Service(abc.ABC):
    """What a task serves in threads, until the chief ends the job."""

    #: Set when the chief has ended the job.
    ended: threading.Event

    def join(self) -> int:
        """Wait for the end of the job; return the exit code."""
        try:
            self.ended.wait()
        finally:
            self.close()
        return self.exit_code

    @property
    @abc.abstractmethod
    def exit_code(self) -> int:
        """For the process, once the job has ended."""

    @abc.abstractmethod
    def close(self) -> None:
        """End all connections."""


class _VariableService(Service):
    """A parameter server and its endpoint.

    Args:
        roles: of the cluster.
    """

    def __init__(self, roles: Roles) -> None:
        keys = read_keys(process_environ(), roles.task, roles.spec)
        directory = process_environ().get(DIRECTORY_VARIABLE)
        self._durable = DurableStore(Path(directory) / f"ps-{roles.task.index}") if directory else None
        self._server = VariableServer(
            VariableStore() if self._durable is None else self._durable.store,
            self._durable,
            lambda client: any(map(client.acts_for, roles.accepted)),
            self._reply,
        )
        self.ended = self._server.ended
        self._endpoint = Endpoint(roles.addresses[roles.task], self._server.handle, keys)
        self._endpoint.start()

    def _reply(self, client: ClientId, request: int, frame: Frame) -> None:
        self._endpoint.reply(client, request, frame)

    @property
    def exit_code(self) -> int:
        """What the chief has said."""
        return self._server.exit_code

    def close(self) -> None:
        """End all connections; what was kept on the disk is removed where the job has ended well."""
        self._endpoint.close()
        if self._durable is not None:
            self._durable.close(remove=self.ended.is_set() and not self.exit_code)


class WorkerService(Service):
    """A worker and its endpoint.

    Args:
        roles: of the cluster; this task computes.
        servers: peers of the parameter servers.
        make_endpoint: from a handler.
    """

    def __init__(
        self,
        roles: Roles,
        servers: Sequence[RequestPeer],
        make_endpoint: Callable[[Handler], RequestEndpoint],
    ) -> None:
        self._client = ServerClient(servers)
        self._worker = StepWorker(
            roles.workers.index(roles.task),
            len(roles.workers),
            self._client,
            load_program,
            self._reply,
            lambda client: any(map(client.acts_for, roles.accepted)),
        )
        self.ended = self._worker.ended
        self._endpoint: RequestEndpoint = make_endpoint(self._worker.handle)
        self._worker.start()
        self._endpoint.start()

    def _reply(self, client: ClientId, request: int, frame: Frame) -> None:
        self._endpoint.reply(client, request, frame)

    @property
    def exit_code(self) -> int:
        """What the chief has said."""
        return self._worker.exit_code

    def close(self) -> None:
        """End all connections."""
        self._worker.close()
        self._endpoint.close()
        self._client.close()


class OwnWorker(WorkerService):
    """The worker of a chief that computes, too: in threads of its process.

    Args:
        roles: of the cluster; the chief is a worker.
        network: within this process.
        servers: peers of the parameter servers.
    """

    def __init__(self, roles: Roles, network: LoopbackNetwork, servers: Sequence[RequestPeer]) -> None:
        super().__init__(roles, servers, lambda handler: network.endpoint(str(roles.task), handler))
