"""The chief's connections to the tasks of its cluster, over ZeroMQ.

Tests: tests/cluster/test_parameter_server.py.
"""

from __future__ import annotations

from unisono._system._environ import process_environ
from unisono.cluster_resolver._base import whole_of
from unisono.cluster_resolver._spec import Task
from unisono.parameter_server.chief._job import Cluster
from unisono.parameter_server.server._open_files import allow_open_files
from unisono.parameter_server.strategy._roles import Roles
from unisono.parameter_server.strategy._serve import WorkerService, is_supervised
from unisono.rpc._calls import RequestClient
from unisono.rpc._loopback import LoopbackNetwork
from unisono.rpc._transport._client import RpcClient
from unisono.rpc._transport._keys import ClusterKeys, read_keys


def connect(roles: Roles) -> Cluster:
    """Return the connections of a chief. Tasks that have not started yet are waited for where they are asked.

    Raises:
        ClusterError: when a task is on another machine and there is no key.
    """
    allow_open_files()
    keys = read_keys(process_environ(), roles.task, roles.spec)
    servers = _clients_of(roles.servers, roles, keys)
    if not roles.computes:
        workers = _clients_of(roles.workers, roles, keys)
        return Cluster(servers, workers, _generation(), is_supervised=is_supervised())
    # Worker 0 is the chief: it gets closures without a socket.
    network = LoopbackNetwork()
    me, name = roles.task, str(roles.task)
    own_servers = _clients_of(roles.servers, roles, keys)
    own = WorkerService(roles, own_servers, lambda handler: network.rpc_server(name, handler))
    workers = [
        network.rpc_client(me, name, me),
        *_clients_of(roles.remote_workers, roles, keys),
    ]
    return Cluster(servers, workers, _generation(), own.close, is_supervised())


def _clients_of(tasks: tuple[Task, ...], roles: Roles, keys: ClusterKeys | None) -> list[RequestClient]:
    return [RpcClient(task, roles.addresses[task], keys) for task in tasks]


def _generation() -> int:
    """Return how often this job was started before; `unisono launch` says it."""
    return whole_of("UNISONO_GENERATION")
