"""Strategies with the arguments that `tf.contrib.distribute` had in 2018.

Tests: tests/unit/tf/test_contrib.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono._errors import InvalidArgumentError
from unisono._mesh import resolve_devices
from unisono.cluster.strategy._multi_worker import MultiWorkerMirroredStrategy
from unisono.cluster_resolver._detect import resolve
from unisono.collectives._cross_device import CrossDeviceOps, HierarchicalCopyAllReduce, NcclAllReduce
from unisono.parameter_server.strategy._parameter_server import ParameterServerStrategy
from unisono.strategies._base import Strategy
from unisono.strategies._central_storage import CentralStorageStrategy
from unisono.strategies._mirrored import MirroredStrategy
from unisono.strategies._one_device import OneDeviceStrategy
from unisono.strategies._tpu import TPUStrategy


def mirrored(
    devices: Sequence[Any] | None = None,
    num_gpus: int | None = None,
    num_gpus_per_worker: int | None = None,
    cross_device_ops: CrossDeviceOps | None = None,
    auto_shard_dataset: bool = False,
    cross_tower_ops: CrossDeviceOps | None = None,
) -> MirroredStrategy | MultiWorkerMirroredStrategy:
    """Return a `MirroredStrategy`; in a cluster of several workers the one of all their devices.

    Args:
        devices: of the replicas; None for all GPUs, or for the CPUs. With names the strategy is that of this
            process also in a cluster.
        num_gpus: how many GPUs, or virtual CPU devices, in place of `devices`; 0 for the CPU.
        num_gpus_per_worker: the same; the workers of a cluster must have as many.
        cross_device_ops: how values are reduced. A cluster reduces in few large messages.
        auto_shard_dataset: whether each worker of an Estimator gets a part of its `input_fn`'s dataset, by
            the dataset's `AutoShardPolicy`; False for all of it on each. One machine reads all data.
        cross_tower_ops: the older name of `cross_device_ops`.

    Raises:
        InvalidArgumentError: more than one of the arguments that say which devices there are, or a worker
            of a cluster has another number of them.
        DeviceError: there are fewer GPUs.
    """
    given = {"devices": devices, "num_gpus": num_gpus, "num_gpus_per_worker": num_gpus_per_worker}
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) > 1:
        raise InvalidArgumentError(
            f"One argument says which devices a strategy has. Received: {', '.join(map(str, named))}."
        )
    gpus = num_gpus if num_gpus is not None else num_gpus_per_worker
    asked = (gpus or 0, auto_shard_dataset)
    resolver = resolve()
    workers = resolver.cluster_spec().num_processes(resolver.task_type or "worker") if resolver else 1
    if devices is None and workers > 1:
        return _of_workers(*asked)
    if gpus == 0:
        devices, gpus = ["cpu:0"], None
    return MirroredStrategy(devices, cross_device_ops or cross_tower_ops, num_gpus=gpus)._with_terms(*asked)


def _of_workers(num_devices: int, shards_input: bool = False) -> MultiWorkerMirroredStrategy:
    """Return a strategy of all workers; without a cluster its devices are counted where it is used."""
    strategy = MultiWorkerMirroredStrategy()._with_terms(num_devices, shards_input)
    if strategy.num_workers > 1:
        strategy._terms.check(len(strategy.worker_devices))
    return strategy


def collective_all_reduce(
    num_gpus_per_worker: int = 0, num_gpus_per_workers: int | None = None
) -> MultiWorkerMirroredStrategy:
    """Return a `MultiWorkerMirroredStrategy`, of which each worker uses all of its devices.

    Args:
        num_gpus_per_worker: how many devices each worker has; 0 for those that there are.
        num_gpus_per_workers: the same, as some texts spell it.

    Raises:
        InvalidArgumentError: a worker of a cluster has another number of devices. Without a cluster the error
            comes where this process would train, because it may be the client of servers that have them.
    """
    return _of_workers(num_gpus_per_workers or num_gpus_per_worker)


def parameter_server(num_gpus_per_worker: int = 0) -> Strategy:
    """Return a `ParameterServerStrategy`; without a cluster, variables on the CPU and replicas on GPUs.

    Args:
        num_gpus_per_worker: how many GPUs, or virtual CPU devices, there are; 0 for one device.
    """
    resolver = resolve()
    if resolver is not None and "ps" in resolver.cluster_spec().as_dict():
        return ParameterServerStrategy(resolver)
    return CentralStorageStrategy(resolve_devices(None, num_gpus_per_worker or 1))


def one_device(device: Any, prefetch_on_device: bool | None = None) -> OneDeviceStrategy:
    """Return a `OneDeviceStrategy`.

    Args:
        device: of all variables and computation.
        prefetch_on_device: is not used: batches are put onto the device ahead.
    """
    return OneDeviceStrategy(device)


def tpu(
    tpu_cluster_resolver: Any = None,
    steps_per_run: int | None = None,
    device_assignment: Any = None,
    **kwargs: object,
) -> TPUStrategy:
    """Return a `TPUStrategy`.

    Args:
        tpu_cluster_resolver: the TPU.
        steps_per_run: is not used: `compile(steps_per_execution=…)` says how many steps run at once.
        device_assignment: the cores that are replicas.
        **kwargs: are not used.
    """
    return TPUStrategy(tpu_cluster_resolver, device_assignment)


def all_reduce_ops(
    all_reduce_alg: str = "nccl",
    num_packs: int = 1,
    agg_small_grads_max_bytes: int = 0,
    agg_small_grads_max_group: int = 10,
) -> CrossDeviceOps:
    """Return the reduction of an algorithm of `AllReduceCrossTowerOps`.

    Args:
        all_reduce_alg: `"nccl"` or `"hierarchical_copy"`.
        num_packs: how many messages gradients are packed into; 0 for one of each gradient.
        agg_small_grads_max_bytes: is not used: small gradients share a message.
        agg_small_grads_max_group: likewise.

    Raises:
        InvalidArgumentError: another algorithm.
    """
    kinds = {"nccl": NcclAllReduce, "hierarchical_copy": HierarchicalCopyAllReduce}
    if all_reduce_alg not in kinds:
        raise InvalidArgumentError(
            f"`all_reduce_alg` is 'nccl' or 'hierarchical_copy'. Received: {all_reduce_alg!r}."
        )
    return kinds[all_reduce_alg](num_packs)
