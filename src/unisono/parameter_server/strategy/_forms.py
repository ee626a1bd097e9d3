"""The two forms of a `ParameterServerStrategy`: devices of this machine, or a cluster that it commands.

Tests: tests/virtual/strategies/test_parameter_server.py, tests/cluster/test_parameter_server.py.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import keras

from unisono._mesh import ReplicaMesh, resolve_devices
from unisono._system._environ import process_environ
from unisono._system._process import allow_open_files
from unisono._system._program_end import expected_exit_code, watch_program
from unisono.cluster._lone_task import servers_joined
from unisono.cluster_resolver._base import whole_of
from unisono.cluster_resolver._spec import Task, split_address
from unisono.parameter_server.chief._closures import Rules
from unisono.parameter_server.chief._job import Cluster, Job
from unisono.parameter_server.chief._partition import shard_bounds, shard_count
from unisono.parameter_server.chief._train_function import RemoteStatefulTrainFunction, RemoteTrainFunction
from unisono.parameter_server.chief._worker_datasets import RunningCalls
from unisono.parameter_server.programs._push_layout import PushLayout
from unisono.parameter_server.strategy._roles import Roles
from unisono.parameter_server.strategy._serve import WorkerService, is_supervised, warn_of_unknown_names
from unisono.parameter_server.tables._sharded_variable import divide
from unisono.rpc._calls import RequestClient
from unisono.rpc._loopback import LoopbackNetwork
from unisono.rpc._transport._client import RpcClient
from unisono.rpc._transport._keys import WATCH_VARIABLES, ClusterKeys, read_keys
from unisono.step._keras_internals import stored_dtype
from unisono.step._layout import CentralLayout, StateLayout
from unisono.step.variables._merge_rules import kind_of
from unisono.strategies._replicated import ReplicatedStrategy
from unisono.training._scope_warnings import strategy_used
from unisono.training._step_form import is_stateful
from unisono.training.trainer._protocol import StepFunction
from unisono.training.trainer._trainer_step import TrainerTask

if TYPE_CHECKING:
    from unisono._lowering._compiler_options import Executables
    from unisono.parameter_server.strategy._parameter_server import ParameterServerStrategy
    from unisono.training.named_steps._protocol import ElementSource, NamedStep, StepRunner


_LOG = logging.getLogger("unisono")


class StrategyForm:
    """What a `ParameterServerStrategy` decides by where its variables live; base of the cluster's form.

    Here variables live on the CPU, and all devices of this machine compute.
    """

    #: What the chief does with the cluster, and what calls of `fit` have there; None without one.
    job: Job | None = None
    calls: RunningCalls | None = None

    def __init__(self) -> None:
        self.mesh = ReplicaMesh(resolve_devices(None))
        home = jax.sharding.SingleDeviceSharding(resolve_devices(["cpu:0"])[0])
        self.state_layout: StateLayout = CentralLayout(self.mesh, home)

    def variable_created(self, variable: keras.Variable) -> None:
        """Divide a variable that was made in the scope, where there are servers for its parts."""

    def trainer_function(
        self, strategy: ParameterServerStrategy, model: keras.Model, task: TrainerTask
    ) -> StepFunction:
        """Return what Keras' loop calls for each batch."""
        return ReplicatedStrategy.make_trainer_function(strategy, model, task)

    def step_runner(
        self,
        strategy: ParameterServerStrategy,
        step: NamedStep,
        source: ElementSource,
        executables: Executables | None,
    ) -> StepRunner:
        """Return what runs the named steps of a loop."""
        return ReplicatedStrategy.make_step_runner(strategy, step, source, executables)

    def end(self, code: int | None = 0) -> None:
        """End the job; see `ParameterServerStrategy.end`."""


class ClusterForm(StrategyForm):
    """Variables on parameter servers, and steps on workers: the form on the chief of a cluster.

    Args:
        partitioner: divides variables; None for whole ones.
        push_dtype: the type in which large gradients are pushed; None for that of their variables.
        pull_dtype: likewise of the weights that steps train.
    """

    job: Job
    calls: RunningCalls

    #: The jobs of this process that have not ended: a cluster serves one chief.
    running: ClassVar[list[Job]] = []

    def __init__(
        self,
        cluster: Cluster,
        rules: Rules,
        partitioner: Callable[..., Any] | None = None,
        push_dtype: str | None = None,
        pull_dtype: str | None = None,
    ) -> None:
        # One replica: what the chief traces is what one worker computes.
        self.mesh = ReplicaMesh(resolve_devices(["cpu:0"]))
        self.state_layout = PushLayout(self.mesh, push_dtype)
        self._partitioner = partitioner
        self.job = Job(cluster, rules, push_dtype, pull_dtype)
        self.calls = RunningCalls(self.job)
        self.running.append(self.job)
        servers_joined()
        watch_program()
        atexit.register(self.end, None)

    def variable_created(self, variable: keras.Variable) -> None:
        """Divide a variable, where the partitioner wants it."""
        # What belongs to a random generator stays on the chief.
        if self._partitioner is None or kind_of(variable).is_seed:
            return
        shape = tuple(variable.shape)
        shards = shard_count(self._partitioner, shape, stored_dtype(variable), variable.path)
        if shards > 1:
            divide(variable, shard_bounds(shape[0], shards))

    def trainer_function(
        self, strategy: ParameterServerStrategy, model: keras.Model, task: TrainerTask
    ) -> StepFunction:
        """Return what sends each batch to a worker."""
        made = RemoteStatefulTrainFunction if is_stateful(model, task) else RemoteTrainFunction
        return made(model, strategy, task, self.job, self.calls)

    def step_runner(
        self,
        strategy: ParameterServerStrategy,
        step: NamedStep,
        source: ElementSource,
        executables: Executables | None,
    ) -> StepRunner:
        """Return what schedules steps on workers, which make their data."""
        from unisono.parameter_server.chief._step_runner import RemoteStepRunner

        strategy_used(strategy)
        return RemoteStepRunner(strategy, step, source)

    def end(self, code: int | None = 0) -> None:
        """End the job, once."""
        self.job.end(expected_exit_code() if code is None else code)
        if self.job in self.running:
            self.running.remove(self.job)
        atexit.unregister(self.end)


def connect(roles: Roles) -> Cluster:
    """Return the connections of a chief. Tasks that have not started yet are waited for where they are asked.

    Raises:
        ClusterError: when a task is on another machine and there is no key.
    """
    warn_of_unknown_names(roles)
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


def show_progress(roles: Roles) -> None:
    """Let `unisono watch` ask the chief for its progress, at its address in the cluster, until it ends.

    Nothing listens without a key for watching. At the addresses of the other tasks the chief is served, with
    the cluster's key.

    Raises:
        ClusterError: the key for watching cannot be used.
    """
    environ = process_environ()
    if not any(environ.get(name) for name in WATCH_VARIABLES):
        return
    if roles.task not in roles.addresses:
        _LOG.warning(
            "`unisono watch HOST:PORT` cannot reach this chief: it has no address in the cluster. Write one "
            "for it: the job `chief` of TF_CONFIG."
        )
        return
    # Few jobs have one.
    from unisono.cluster._watch_port import WatchPort

    address, own = roles.addresses[roles.task], str(roles.task)
    port = WatchPort(own, {own: address})
    port.listen(split_address(address)[0])
    # Before the end of the job, which is registered earlier: the other tasks need not have ended.
    atexit.register(lambda: port.end(expected_exit_code()))


def _clients_of(tasks: tuple[Task, ...], roles: Roles, keys: ClusterKeys | None) -> list[RequestClient]:
    return [RpcClient(task, roles.addresses[task], keys) for task in tasks]


def _generation() -> int:
    """Return how often this job was started before; `unisono launch` says it."""
    return whole_of("UNISONO_GENERATION")
