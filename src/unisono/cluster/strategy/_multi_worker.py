"""`MultiWorkerMirroredStrategy`: synchronous training on the devices of several processes.

Tests: tests/virtual/strategies/test_multi_worker_program.py, tests/cluster/test_chief.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import keras
import numpy as np

from unisono._checks import check_instance
from unisono._features import load
from unisono._mesh import AXIS, ReplicaMesh, devices_of_all
from unisono._system._environ import process_environ
from unisono.cluster import _distributed
from unisono.cluster._lone_task import find_siblings
from unisono.cluster.strategy._chief_callbacks import silence_autologging
from unisono.cluster.strategy._fit import MultiWorkerFit
from unisono.cluster_resolver._base import (
    START_UP_VARIABLE,
    ClusterResolver,
    TFConfigClusterResolver,
    seconds_of,
)
from unisono.cluster_resolver._detect import resolve
from unisono.cluster_resolver._spec import Timeouts
from unisono.collectives._cross_device import CommunicationOptions, CrossDeviceOps, PackedAllReduce, own_ops
from unisono.collectives._process_group import ProcessGroup, joined_group
from unisono.step._layout import Synchronization
from unisono.strategies._base import Arguments, Strategy
from unisono.strategies._replicated import ReplicatedStrategy, layout_of, mesh_of

if TYPE_CHECKING:
    from unisono.model_parallel._layout_rules import LayoutMap

if TYPE_CHECKING:
    from unisono._system._literals import StateLayoutName

_LOG = logging.getLogger("unisono")


class MultiWorkerMirroredStrategy(ReplicatedStrategy):
    """Every device of every worker holds a copy of every variable; gradients are all-reduced.

    The same program runs on every worker, with the same *global* batches: each worker computes its
    part of them. Initial values come from the first worker. Without a cluster it is a
    `MirroredStrategy` of this process.

    Args:
        cluster_resolver: describes the workers. None reads TF_CONFIG, Slurm's, MPI's or JAX's
            variables.
        communication_options: how gradients travel, and how long a collective may take.
        timeouts: how long workers wait for each other.
        state_layout: `"mirrored"`, or `"sharded"`: each device holds and updates its part of the
            optimizer's variables, which then take 1/n of the memory with n replicas; or
            `"fully_sharded"`: of weights, too, which are made whole where a step uses them.
        cross_device_ops: a `CompressedAllReduce` sends gradients in fewer bytes. Other algorithms are
            chosen by `communication_options`.
        sync: `LocalUpdates` lets each replica train by itself for some steps, between which nothing is sent.
            None averages the gradients of each step.
        devices_per_replica: of how many devices each replica consists, for models that do not fit on one:
            devices of a process, or all devices of several.
        layout_map: along which axes variables are cut over the devices of a replica, as in
            `MirroredStrategy`.

    Raises:
        InvalidArgumentError: for another `state_layout`, or one that does not go with `sync`.
        InvalidTypeError: when an argument has another type.
        BackendError: JAX has started before.
        ClusterError: a worker is missing, or its program differs.

    >>> MultiWorkerMirroredStrategy().num_workers
    1
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        timeouts: Timeouts | None = None,
        state_layout: StateLayoutName = "mirrored",
        cross_device_ops: CrossDeviceOps | None = None,
        sync: Synchronization | None = None,
        devices_per_replica: int = 1,
        layout_map: LayoutMap | None = None,
    ) -> None:
        hint = "Leave it out, or pass an object of that class."
        if cross_device_ops is not None:
            check_instance(cross_device_ops, "cross_device_ops", load("class CompressedAllReduce"), hint)
        check_instance(cluster_resolver, "cluster_resolver", ClusterResolver, hint)
        check_instance(communication_options, "communication_options", CommunicationOptions, hint)
        self._resolver = resolve() if cluster_resolver is None else cluster_resolver
        self._options = communication_options or CommunicationOptions()
        timeouts = timeouts or Timeouts(start_up=seconds_of(START_UP_VARIABLE, Timeouts.start_up))
        limit = self._options.timeout_seconds or timeouts.collective
        # Without a cluster it may still be the second strategy of a process that has joined one.
        group = joined_group()
        if self._resolver:
            with_spare = isinstance(sync, Synchronization) and sync.overlap > 0
            interface = self._options.interface or ""
            group = _distributed.join(self._resolver, timeouts, limit, interface, with_spare)
        devices = devices_of_all()
        if self._resolver and self._resolver.task_type == "evaluator" and devices_per_replica != 1:
            fitted = load("replicas of an evaluator")
            devices_per_replica, layout_map = fitted(len(devices), devices_per_replica, layout_map)
        super().__init__(mesh_of(devices, devices_per_replica), group)
        self._ops = own_ops(self._mesh.platform)
        #: What the workers compare and share in `fit`; None where there is one.
        self._fit: MultiWorkerFit | None = None
        if group.size > 1:
            self._ops = PackedAllReduce(self._options, self._mesh.platform, group.is_on_one_host)
            self._fit = MultiWorkerFit(self)
            # One device of each process was connected by the collectives that started the cluster.
            if len(self._mesh.local_devices) > 1 or self._mesh.platform != "cpu":
                _connect(self._mesh, group)
            if not group.is_chief:
                silence_autologging()
        else:
            _say_that_it_is_alone(type(self).__name__, self._mesh.num_replicas)
        if cross_device_ops is not None:
            self._ops = cross_device_ops._over(self._ops)
        self._state_layout = layout_of(state_layout, self._ops, sync, self._mesh, self._group, layout_map)
        for mesh in () if self._fit is None else self._state_layout.meshes_beside:
            _connect(mesh, group)

    @property
    def _of_servers(self) -> Callable[[], Strategy]:
        """Makes the strategy of all devices of a remote cluster."""
        return MultiWorkerMirroredStrategy

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """Few large buckets, or the compression that the constructor was given."""
        return self._ops

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """What describes the cluster; without one, a resolver whose `task_type` is None."""
        return self._resolver or TFConfigClusterResolver()

    @property
    def num_workers(self) -> int:
        """How many processes compute."""
        return self._group.size

    @property
    def worker_index(self) -> int:
        """This process' number."""
        return self._group.index

    def _around_fit(
        self, model: keras.Model, arguments: Arguments, ahead: bool
    ) -> contextlib.AbstractContextManager[tuple[Arguments, bool]]:
        """Surround `fit`: all workers begin alike, the chief writes, and decisions are shared."""
        if self._fit is None:
            return super()._around_fit(model, arguments, ahead)
        return self._fit.around(model, arguments, ahead)

    def _around_test(
        self, model: keras.Model, name: str, arguments: Arguments, ahead: bool
    ) -> contextlib.AbstractContextManager[tuple[Arguments, bool]]:
        """Compare a call of `evaluate` or `predict` between the workers; the chief prints."""
        if self._fit is not None:
            arguments, ahead = self._fit.prepare(model, name, arguments, ahead)
        return super()._around_test(model, name, arguments, ahead)


def _say_that_it_is_alone(name: str, replicas: int) -> None:
    """Log that a strategy for several workers has found one process, as a warning where it has siblings."""
    found = find_siblings(process_environ())
    count = f"{replicas} replica{'s' * (replicas > 1)}"
    alone = f"{name} has found no other worker: it trains in this process alone, on {count}"
    if found is None:
        _LOG.info("%s.", alone)
        return
    sign, remedy = found
    _LOG.warning(
        "%s. But %s: each of these processes would train a model of its own. %s; or pass a "
        "`cluster_resolver`, or TF_CONFIG.",
        alone, sign, remedy,
    )  # fmt: skip


def _connect(mesh: ReplicaMesh, group: ProcessGroup) -> None:
    """Run a collective on all devices: Gloo connects them at the first one, and gives up after 30 s.

    All workers are here now; later one may be loading data.
    """
    spec = mesh.sharded.spec
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, AXIS), mesh=mesh.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    with group.collective():
        jax.block_until_ready(jax.jit(total)(mesh.put(np.zeros(mesh.num_replicas, np.float32), mesh.sharded)))


#: TensorFlow's first name for it.
CollectiveAllReduceStrategy = MultiWorkerMirroredStrategy

__all__: Sequence[str] = ["CollectiveAllReduceStrategy", "MultiWorkerMirroredStrategy"]
