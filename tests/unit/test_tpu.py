"""The TPU's resolver and initialisation, on CPU devices given by hand."""

import types

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


def test_replicas_of_several_cores(four):
    experimental = unisono.tpu.experimental
    topology = experimental.initialize_tpu_system(four)
    assignment = experimental.DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2], num_replicas=2)
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (2, 2)
    assert [str(d) for d in assignment.devices] == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    pairs = [[[3, 0, 0, 0], [1, 0, 0, 0]], [[0, 0, 0, 0], [2, 0, 0, 0]]]
    strategy = unisono.TPUStrategy(four, experimental.DeviceAssignment(topology, pairs))
    assert strategy.num_replicas_in_sync == 2
    assert [str(d) for d in strategy.mesh.devices_of(0)] == ["cpu:3", "cpu:1"]
    assert unisono.TPUStrategy(four, experimental_spmd_xla_partitioning=True).num_replicas_in_sync == 4


def v3_8():
    """The topology of a TPU with 2 x 2 chips of two cores, as JAX describes its devices."""
    places = [(x, y, 0, core) for y in range(2) for x in range(2) for core in range(2)]
    cores = [types.SimpleNamespace(coords=p[:3], core_on_chip=p[3], process_index=0) for p in places]
    return unisono.tpu.experimental.Topology(tuple(cores))


@pytest.mark.parametrize(
    ("shape", "stride", "replicas", "first_cores"),
    [
        # What TensorFlow 2.21 returns, of each replica the first core.
        ([1, 1, 1, 2], None, 4, [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0]]),
        ([1, 2, 1, 2], None, 2, [[0, 0, 0, 0], [1, 0, 0, 0]]),
        (None, None, 4, [[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 1]]),
        ([1, 1, 1, 1], [2, 1, 1, 1], 4, [[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 1]]),
    ],
)
def test_blocks_of_cores_lie_as_in_tensorflow(shape, stride, replicas, first_cores):
    build = unisono.tpu.experimental.DeviceAssignment.build
    assignment = build(v3_8(), shape, stride, replicas)
    assert assignment.core_assignment[:, 0].tolist() == first_cores
    assert len(assignment.devices) == replicas * assignment.num_cores_per_replica


def test_blocks_that_do_not_fit(four):
    build = unisono.tpu.experimental.DeviceAssignment.build
    topology = unisono.tpu.experimental.initialize_tpu_system(four)
    wrong = [{"computation_shape": [2, 1, 1, 1], "num_replicas": 3}, {"num_replicas": 5}, {"num_replicas": 0}]
    wrong += [{"computation_shape": [2, 1, 1]}, {"computation_shape": [2, 0, 1, 1]}]
    wrong += [{"computation_stride": [0, 1, 1, 1]}]
    for options in wrong:
        with pytest.raises(ValueError, match="Received"):
            build(topology, **options)
    with pytest.raises(ValueError, match=r"from 1 to 0: .* mesh of shape \[2, 2, 1, 2\]"):
        build(v3_8(), [1, 2, 2, 2])
    with pytest.raises(ValueError, match=r"the shape \(replicas, cores per replica, 4\)"):
        unisono.tpu.experimental.DeviceAssignment(topology, [[[0, 0, 0]]])
    for places, message in (([[[9, 0, 0, 0]]], "must have a core"), ([[[1, 0, 0, 0]] * 2], "twice")):
        with pytest.raises(ValueError, match=message):
            _ = unisono.tpu.experimental.DeviceAssignment(topology, places).devices
    with pytest.raises(TypeError, match="initialize_tpu_system"):
        unisono.tpu.experimental.DeviceAssignment("v3-8", [[[0, 0, 0, 0]]])
    with pytest.raises(TypeError, match="TPUClusterResolver"):
        unisono.TPUStrategy("grpc://10.0.0.1:8470")


def test_logical_devices(four):
    strategy, x = unisono.TPUStrategy(four), np.ones((2, 3))
    assert strategy.experimental_assign_to_logical_device(x, 0) is x
    assert strategy.experimental_split_to_logical_devices(x, [1, 1]) is x
    assert strategy.experimental_replicate_to_logical_devices(x) is x
    with pytest.raises(ValueError, match="logical_device_id=1"):
        strategy.experimental_assign_to_logical_device(x, 1)
    for parts, message in (([2, 1], r"Write \[1, 1\]"), ([1], "rank of the tensor, 2")):
        with pytest.raises(ValueError, match=message):
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
