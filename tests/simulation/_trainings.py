"""What chiefs that train have in common: a strategy on a simulated cluster, and XLA's programs.

Keras, JAX and XLA are the real ones here. A program is compiled once in a process, whichever world runs it,
and no thread is interrupted while one is traced, as traces belong to the thread, which all fibers share.

Tests: tests/unit/test_simulated_trainings.py.
"""

import contextlib
import functools
import types
from unittest import mock

import keras
import pytest
from keras.src.callbacks import callback_list

from tests.simulation import _primitives as sim
from tests.simulation._world import ACTIVE
from tests.simulation.protocol_closures import Closures
from unisono._mesh import ReplicaMesh, resolve_devices
from unisono.cluster_resolver._spec import Task
from unisono.parameter_server.chief import _plans, _remote_variables
from unisono.parameter_server.chief._closures import Rules
from unisono.parameter_server.chief._job import Cluster, Job
from unisono.parameter_server.chief._worker_datasets import RunningCalls
from unisono.parameter_server.programs import _function_step, _preparation, _worker_step
from unisono.parameter_server.programs._push_layout import PushLayout
from unisono.parameter_server.server import _programs
from unisono.parameter_server.strategy import _parameter_server
from unisono.parameter_server.strategy._forms import ClusterForm
from unisono.parameter_server.strategy._parameter_server import ParameterServerStrategy
from unisono.partitioners import FixedShardsPartitioner

#: By its bytes.
compiled = functools.cache(_programs.ExportedProgram)
#: What traces.
_TRACING = (
    (_worker_step, "make_program"),
    (_function_step, "make_program"),
    (_plans, "_in_parts"),
    (_plans, "ServerUpdate"),
)


def _alone(function):
    """Let no thread be interrupted during calls of a function."""

    def call(*args, **kwargs):
        world = ACTIVE.world
        before, world._preempt = world._preempt, 0.0
        try:
            return function(*args, **kwargs)
        finally:
            world._preempt = before

    return call


@contextlib.contextmanager
def real_programs():
    """Run the block with XLA's programs. Values and gradients of any size are rounded, if they are."""
    futures = types.SimpleNamespace(ThreadPoolExecutor=sim.ThreadPoolExecutor, wait=sim.wait)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_programs, "ExportedProgram", compiled)
        for module, name in _TRACING:
            patch.setattr(module, name, _alone(getattr(module, name)))
        # Keras reads logs in threads.
        patch.setattr(callback_list, "concurrent", types.SimpleNamespace(futures=futures))
        patch.setattr(_preparation, "_EXACT_BELOW", 0)
        yield patch


class _Form(ClusterForm):
    """A cluster's form that nothing of this process knows."""

    def __init__(self, cluster, rules, partitioner, dtype):
        self.mesh = ReplicaMesh(resolve_devices(["cpu:0"]))
        self.state_layout = PushLayout(self.mesh, dtype)
        self._partitioner = partitioner
        self.job = Job(cluster, rules, dtype, dtype)
        self.calls = RunningCalls(self.job)


class Trainings(Closures):
    """A cluster whose chief trains."""

    #: Whether variables are divided; whether those that are looked up are used by rows; a type of 16 bits.
    is_divided = has_tables = False
    dtype = None

    def program(self):
        """Return what loads programs for a worker."""
        return lambda digest, data: compiled(data)

    def lead(self):
        """Train, and end the cluster."""
        plan = self.plan
        chief = Task("chief", 0)
        number = self.starts = self.starts + 1
        clients = [
            [self.network.rpc_client(Task(job, i), f"{job}{i}", chief) for i in range(count)]
            for job, count in (("ps", plan.servers), ("worker", plan.workers))
        ]
        cluster = Cluster(*clients, number, is_supervised=True)
        partitioner = FixedShardsPartitioner(2) if self.is_divided else None
        form = _Form(cluster, Rules(self.bound), partitioner, self.dtype)
        self.jobs.append(form.job.client.generation)
        with mock.patch.object(_parameter_server, "StrategyForm", return_value=form):
            strategy = ParameterServerStrategy()
        # Names of variables are a part of programs.
        keras.backend.clear_session()
        self.train(strategy)
        # From here on nothing happens any more: all tasks are there, or come, to be told.
        self.world.faults_left = 0
        self.ending.append(number)
        strategy.end()

    def run(self):
        """Run the job with XLA's programs."""
        with real_programs() as patch:
            patch.setattr(_remote_variables, "SMALL_TABLE_BYTES", 0 if self.has_tables else 1 << 20)
            super().run()

    def train(self, strategy):
        """Train, and check what the servers have."""
        raise NotImplementedError
