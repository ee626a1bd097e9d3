"""The TPU's resolver and initialisation, on CPU devices given by hand."""

import pytest

import unisono


def test_devices_given_by_hand():
    resolver = unisono.cluster_resolver.TPUClusterResolver(devices=["cpu:0", "cpu:1"])
    unisono.tpu.experimental_connect_to_cluster(resolver)
    topology = unisono.tpu.initialize_tpu_system(resolver)
    assert (topology.num_tasks, topology.num_tpu_devices_per_task) == (1, 2)
    assert resolver.num_accelerators() == {"TPU": 2}
    assert (resolver.master(), resolver.cluster_spec(), resolver.environment) == ("", {}, "")
    metadata = resolver.get_tpu_system_metadata()
    assert (metadata.num_cores, metadata.num_hosts, metadata.num_of_cores_per_host) == (2, 1, 2)
    assert [str(device) for device in metadata.devices] == [str(device) for device in resolver.devices]
    strategy = unisono.TPUStrategy(resolver)
    assert strategy.num_replicas_in_sync == 2
    assert strategy.cluster_resolver is resolver


def test_without_a_tpu():
    with pytest.raises(RuntimeError, match="A TPU must be attached"):
        unisono.cluster_resolver.TPUClusterResolver()


def test_connect_needs_a_resolver():
    with pytest.raises(TypeError, match="cluster resolver"):
        unisono.tpu.experimental_connect_to_cluster("tpu")
