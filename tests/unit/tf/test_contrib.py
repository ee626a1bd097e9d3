"""Strategies with the arguments of `tf.contrib.distribute`."""

import pytest

import unisono
from unisono import tf

contrib = tf.contrib.distribute


def test_arguments_that_say_which_devices():
    for strategy in (
        contrib.MirroredStrategy(["cpu:0", "cpu:1"]),
        contrib.MirroredStrategy(num_gpus=2),
        contrib.MirroredStrategy(num_gpus_per_worker=2),
    ):
        assert strategy.num_replicas_in_sync == 2
    assert contrib.MirroredStrategy(num_gpus=0).num_replicas_in_sync == 1
    with pytest.raises(unisono.InvalidArgumentError, match="num_gpus, num_gpus_per_worker"):
        contrib.MirroredStrategy(num_gpus=1, num_gpus_per_worker=1)
    with pytest.raises(unisono.InvalidArgumentError, match="devices, num_gpus"):
        contrib.MirroredStrategy(["cpu:0"], num_gpus=1)


def test_reductions_by_the_names_of_towers():
    ops = contrib.AllReduceCrossTowerOps("hierarchical_copy", num_packs=2)
    assert isinstance(ops, unisono.HierarchicalCopyAllReduce)
    strategy = contrib.MirroredStrategy(num_gpus=2, cross_tower_ops=ops)
    assert strategy.cross_device_ops is ops
    assert isinstance(contrib.AllReduceCrossTowerOps(), unisono.NcclAllReduce)
    with pytest.raises(unisono.InvalidArgumentError, match="pscpu"):
        contrib.AllReduceCrossTowerOps("pscpu")


def test_strategies_without_a_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    there = len(contrib.CollectiveAllReduceStrategy().extended.worker_devices)
    assert contrib.CollectiveAllReduceStrategy(num_gpus_per_worker=there).num_replicas_in_sync == there
    # It may be the client of servers.
    with pytest.warns(UserWarning, match="num_gpus_per_worker=77"):
        contrib.CollectiveAllReduceStrategy(num_gpus_per_workers=77)
    local = contrib.ParameterServerStrategy(num_gpus_per_worker=2)
    assert isinstance(local, unisono.experimental.CentralStorageStrategy)
    assert local.num_replicas_in_sync == 2
    assert contrib.ParameterServerStrategy().num_replicas_in_sync == 1
    assert contrib.OneDeviceStrategy("/cpu:0", prefetch_on_device=False).num_replicas_in_sync == 1
    resolver = unisono.cluster_resolver.TPUClusterResolver(devices=["cpu:0", "cpu:1"])
    assert contrib.TPUStrategy(resolver, steps_per_run=10).num_replicas_in_sync == 2
