"""The TPU's resolver and initialisation, on CPU devices given by hand."""

import numpy as np
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


@pytest.fixture
def four():
    return unisono.cluster_resolver.TPUClusterResolver(devices=[f"cpu:{i}" for i in range(4)])


def test_a_part_of_the_cores(four):
    experimental = unisono.tpu.experimental
    topology = experimental.initialize_tpu_system(four)
    assert isinstance(topology, experimental.Topology)
    assert topology.device_coordinates.shape == (1, 4, 4)
    assert topology.mesh_shape.tolist() == [4, 1, 1, 1]
    assignment = experimental.DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 1], num_replicas=2)
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (2, 1)
    strategy = unisono.TPUStrategy(four, assignment)
    assert [str(d) for d in strategy.worker_devices] == ["cpu:0", "cpu:1"]
    chosen = experimental.DeviceAssignment(topology, [[[3, 0, 0, 0]], [[1, 0, 0, 0]]])
    old = unisono.experimental.TPUStrategy(four, device_assignment=chosen)
    assert isinstance(old, unisono.TPUStrategy)
    assert [str(d) for d in old.worker_devices] == ["cpu:3", "cpu:1"]
    assert experimental.shutdown_tpu_system(four) is None


def test_a_replica_is_one_core(four):
    build = unisono.tpu.experimental.DeviceAssignment.build
    topology = unisono.tpu.experimental.initialize_tpu_system(four)
    for wrong in ({"computation_shape": [2, 1, 1, 1]}, {"num_replicas": 5}, {"num_replicas": 0}):
        with pytest.raises(ValueError, match="Received"):
            build(topology, **wrong)
    for places in ([[[0, 0, 0]]], [[[0, 0, 0, 0], [1, 0, 0, 0]]]):
        with pytest.raises(ValueError, match="Received"):
            unisono.tpu.experimental.DeviceAssignment(topology, places)
    with pytest.raises(ValueError, match="must have a core"):
        _ = unisono.tpu.experimental.DeviceAssignment(topology, [[[9, 0, 0, 0]]]).devices
    with pytest.raises(TypeError, match="initialize_tpu_system"):
        unisono.tpu.experimental.DeviceAssignment("v3-8", [[[0, 0, 0, 0]]])
    with pytest.raises(ValueError, match="one core"):
        unisono.TPUStrategy(four, experimental_spmd_xla_partitioning=True)
    with pytest.raises(TypeError, match="TPUClusterResolver"):
        unisono.TPUStrategy("grpc://10.0.0.1:8470")


def test_logical_devices(four):
    strategy, x = unisono.TPUStrategy(four), np.ones((2, 3))
    assert strategy.experimental_assign_to_logical_device(x, 0) is x
    assert strategy.experimental_split_to_logical_devices(x, [1, 1]) is x
    assert strategy.experimental_replicate_to_logical_devices(x) is x
    with pytest.raises(ValueError, match="logical_device_id=1"):
        strategy.experimental_assign_to_logical_device(x, 1)
    for parts in ([2, 1], [1]):
        with pytest.raises(ValueError, match=r"Write \[1, 1\]"):
            strategy.experimental_split_to_logical_devices(x, parts)


def test_arguments_of_tensorflow():
    resolver = unisono.cluster_resolver.TPUClusterResolver(
        "local", "zone", "project", "job", "name", "address", "default", None, None, devices=["cpu:0"]
    )
    assert (resolver.get_job_name(), resolver.get_master()) == ("job", "")
    assert resolver.get_coordination_service_leader() == "/job:job/task:0"
    feature = resolver.tpu_hardware_feature
    assert feature.embedding_feature is unisono.tpu.experimental.HardwareFeature.EmbeddingFeature.UNSUPPORTED


def test_old_constructors():
    strategy = unisono.experimental.MultiWorkerMirroredStrategy(
        unisono.experimental.CollectiveCommunication.RING, None
    )
    assert isinstance(strategy, unisono.MultiWorkerMirroredStrategy)
    assert strategy.num_workers == 1
    hints = unisono.experimental.CollectiveHints(bytes_per_pack=8, timeout_seconds=2.0)
    merged = unisono.CommunicationOptions().merge(hints)
    assert (merged.bytes_per_pack, merged.timeout_seconds) == (8, 2.0)


def test_without_a_tpu():
    with pytest.raises(RuntimeError, match="A TPU must be attached"):
        unisono.cluster_resolver.TPUClusterResolver()


def test_connect_needs_a_resolver():
    with pytest.raises(TypeError, match="cluster resolver"):
        unisono.tpu.experimental_connect_to_cluster("tpu")
