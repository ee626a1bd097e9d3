"""Clusters of parameter servers within a process: servers and workers as threads over the loopback."""

import contextlib
from unittest import mock

from unisono.cluster_resolver._spec import Task
from unisono.parameter_server.chief._closures import Rules
from unisono.parameter_server.chief._job import Cluster
from unisono.parameter_server.server._client import ServerClient
from unisono.parameter_server.server._server import VariableServer
from unisono.parameter_server.server._store import VariableStore
from unisono.parameter_server.strategy import _parameter_server
from unisono.parameter_server.strategy._forms import ClusterForm
from unisono.parameter_server.strategy._parameter_server import ParameterServerStrategy
from unisono.parameter_server.strategy._serve import load_program
from unisono.parameter_server.worker._step_worker import StepWorker
from unisono.rpc._loopback import LoopbackNetwork


class LocalCluster:
    """Servers and workers as threads.

    Args:
        workers: how many.
        servers: how many.
        copies: see `LoopbackNetwork`.
    """

    def __init__(self, workers=2, servers=1, copies=None):
        self.network = LoopbackNetwork(copies)
        self.chief = Task("chief", 0)
        self.server_tasks = [Task("ps", i) for i in range(servers)]
        self.worker_tasks = [Task("worker", i) for i in range(workers)]
        self.rpc_servers, self.workers, self.clients = {}, {}, []
        self.servers = [VariableServer(VariableStore()) for _ in self.server_tasks]
        for task, server in zip(self.server_tasks, self.servers, strict=True):
            self.rpc_servers[task] = self.network.rpc_server(str(task), server.handle)
            self.rpc_servers[task].start()
        for task in self.worker_tasks:
            self.start_worker(task)

    def start_worker(self, task):
        """Start a worker, or start it again."""
        client = ServerClient(self.peers_of_servers(task))
        self.clients.append(client)
        rpc_server = None
        worker = StepWorker(
            task.index,
            len(self.worker_tasks),
            client,
            load_program,
            lambda *args: rpc_server.reply(*args),
            lambda client: client.task == self.chief,
        )
        rpc_server = self.rpc_servers[task] = self.network.rpc_server(str(task), worker.handle)
        self.workers[task] = worker
        worker.start()
        rpc_server.start()

    def kill_worker(self, task):
        """Let a worker disappear, with what it was sent."""
        self.rpc_servers.pop(task).close()
        self.workers.pop(task).close()

    def peers_of_servers(self, own):
        return [self.network.rpc_client(task, str(task), own) for task in self.server_tasks]

    def connections(self, generation=0):
        """Return the connections of a chief."""
        return Cluster(
            self.peers_of_servers(self.chief),
            [self.network.rpc_client(task, str(task), self.chief) for task in self.worker_tasks],
            generation,
        )

    def close(self):
        for worker in self.workers.values():
            worker.close()
        for rpc_server in self.rpc_servers.values():
            rpc_server.close()
        # They would ask a server that is gone for minutes.
        for client in self.clients:
            client.close()


@contextlib.contextmanager
def local_strategy(workers=2, servers=1, max_staleness=None, variable_partitioner=None, copies=None, **types):
    """Give a strategy on servers and workers of this process."""
    cluster = LocalCluster(workers, servers, copies)
    form = ClusterForm(cluster.connections(), Rules(max_staleness), variable_partitioner, **types)
    with mock.patch.object(_parameter_server, "StrategyForm", return_value=form):
        strategy = ParameterServerStrategy()
    strategy.cluster = cluster
    try:
        yield strategy
    finally:
        strategy.end()
        cluster.close()
