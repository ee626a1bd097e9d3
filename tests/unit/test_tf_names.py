"""Every name of tf.distribute works in Unisono, or the error says what to write."""

import functools

import pytest

import unisono

#: All names of `tf.distribute` in TensorFlow 2.21.
NAMES = """
    CrossDeviceOps DistributedDataset DistributedIterator DistributedValues HierarchicalCopyAllReduce
    InputContext InputOptions InputReplicationMode MirroredStrategy MultiWorkerMirroredStrategy
    NcclAllReduce OneDeviceStrategy ParameterServerStrategy ReduceOp ReductionToOneDevice ReplicaContext
    RunOptions Server Strategy StrategyExtended TPUStrategy experimental_set_strategy
    get_replica_context get_strategy has_strategy in_cross_replica_context
    cluster_resolver.ClusterResolver cluster_resolver.GCEClusterResolver
    cluster_resolver.KubernetesClusterResolver cluster_resolver.KubernetesExecutableLocation
    cluster_resolver.SimpleClusterResolver cluster_resolver.SlurmClusterResolver
    cluster_resolver.TFConfigClusterResolver cluster_resolver.TPUClusterResolver
    cluster_resolver.UnionResolver coordinator.ClusterCoordinator coordinator.PerWorkerValue
    coordinator.RemoteValue coordinator.experimental_get_current_worker_index
    experimental.CentralStorageStrategy experimental.CollectiveCommunication
    experimental.CollectiveHints experimental.CommunicationImplementation
    experimental.CommunicationOptions experimental.MultiWorkerMirroredStrategy
    experimental.ParameterServerStrategy experimental.PreemptionCheckpointHandler
    experimental.PreemptionWatcher experimental.TPUStrategy experimental.TerminationConfig
    experimental.ValueContext experimental.coordinator.ClusterCoordinator
    experimental.coordinator.PerWorkerValues experimental.coordinator.RemoteValue
    experimental.partitioners.FixedShardsPartitioner experimental.partitioners.MaxSizePartitioner
    experimental.partitioners.MinSizePartitioner experimental.partitioners.Partitioner
    experimental.rpc.Client experimental.rpc.Server
"""
#: `tf.compat.v1.distribute`, `tf.contrib.distribute`, and what else of TensorFlow belongs to distribution.
OLD_NAMES = """
    get_loss_reduction AllReduceCrossTowerOps CollectiveAllReduceStrategy CrossTowerOps DistributeConfig
    DistributionStrategy Monitor ReductionToOneDeviceCrossTowerOps StandardInputStep
    StandardSingleLossStep Step TowerContext UpdateContext get_cross_tower_context
    get_distribution_strategy get_tower_context has_distribution_strategy require_tower_context
    run_standard_tensorflow_server Variable VariableAggregation VariableSynchronization GradientTape
    IndexedSlices function nn.compute_average_loss nn.scale_regularization_loss data.Dataset
    data.Options data.experimental estimator.Estimator estimator.EstimatorSpec estimator.EvalSpec
    estimator.ModeKeys estimator.RunConfig estimator.TrainSpec estimator.train_and_evaluate
    CoordinatorMode ShardedVariable tpu.experimental.DeviceAssignment tpu.experimental.HardwareFeature
    tpu.experimental.TPUSystemMetadata tpu.experimental.Topology tpu.experimental.initialize_tpu_system
    tpu.experimental.shutdown_tpu_system tpu.experimental.embedding keras.Model train.Checkpoint
    tf.distribute compat.tf
"""
#: What objects have, by the class that must have it.
MEMBERS = {
    "Strategy": """cluster_resolver colocate_vars_with configure distribute_datasets_from_function
        experimental_distribute_dataset experimental_distribute_datasets_from_function
        experimental_distribute_values_from_function experimental_local_results experimental_run
        experimental_run_v2 extended gather group make_dataset_iterator make_input_fn_iterator
        experimental_make_numpy_dataset num_replicas_in_sync reduce run scope unwrap update_config_proto""",
    "StrategyExtended": """batch_reduce_to broadcast_to call_for_each_replica colocate_vars_with
        experimental_between_graph experimental_require_static_shapes experimental_run_steps_on_iterator
        experimental_should_init non_slot_devices parameter_devices read_var reduce_to should_checkpoint
        should_save_summary update update_non_slot value_container variable_created_in_scope
        worker_devices""",
    "ReplicaContext": """all_gather all_reduce devices merge_call num_replicas_in_sync
        replica_id_in_sync_group strategy""",
    "InputContext": "get_per_replica_batch_size input_pipeline_id num_input_pipelines num_replicas_in_sync",
    "CrossDeviceOps": """batch_reduce batch_reduce_implementation broadcast broadcast_implementation reduce
        reduce_implementation""",
    "TPUStrategy": """experimental_assign_to_logical_device experimental_replicate_to_logical_devices
        experimental_split_to_logical_devices""",
    "DistributedDataset": "element_spec reduce",
    "DistributedIterator": "element_spec get_next get_next_as_optional",
    "cluster_resolver.ClusterResolver": "cluster_spec environment master num_accelerators task_id task_type",
    "cluster_resolver.SlurmClusterResolver": "get_task_info",
    "cluster_resolver.TPUClusterResolver": """connect get_job_name get_master get_tpu_system_metadata
        get_coordination_service_leader set_tpu_topology tpu_hardware_feature""",
    "Variable": """assign assign_add assign_sub batch_scatter_update read_value scatter_add scatter_div
        scatter_max scatter_min scatter_mul scatter_sub scatter_update values""",
}


#: What the error of a name that does not work says.
SAYS = ("In Unisono write", "does not have yet", "not part of Unisono")


def find(path):
    """The object at a path below `unisono`, walked as a program does."""
    return functools.reduce(getattr, path.split("."), unisono)


@pytest.mark.parametrize("path", [*NAMES.split(), *OLD_NAMES.split()])
def test_a_name_works_or_says_what_to_write(path):
    said = ""
    try:
        found = find(path)
    except AttributeError as error:
        found = said = str(error)
    assert found is not None
    assert not said or any(words in said for words in SAYS), said


@pytest.mark.parametrize("owner", MEMBERS)
def test_members(owner):
    missing = [name for name in MEMBERS[owner].split() if not hasattr(find(owner), name)]
    assert not missing


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("MirorredStrategy", "unisono.MirroredStrategy"),
        ("MultiworkerMirroredStrategy", "unisono.MultiWorkerMirroredStrategy"),
        ("get_replica_contxt", "unisono.get_replica_context"),
        ("experimental.CentralStorage", "unisono.experimental.CentralStorageStrategy"),
        ("cluster_resolver.TFConfigResolver", "unisono.cluster_resolver.TFConfigClusterResolver"),
        ("tpu.initialize_tpu", "unisono.tpu.initialize_tpu_system"),
    ],
)
def test_misspelled_names(path, meant):
    with pytest.raises(AttributeError, match=f"Did you mean `{meant}`"):
        find(path)


def test_a_name_of_nothing():
    with pytest.raises(AttributeError, match=r"has no attribute 'xqzw'$"):
        find("xqzw")


def test_hints_are_about_names_that_do_not_work():
    """A hint for a name that works would be a lie; what a hint tells to write exists."""
    import re

    from unisono._names import HINTS

    for path, hint in HINTS.items():
        with pytest.raises(AttributeError, match="module 'unisono"):
            find(path)
        for told in re.findall(r"`unisono\.([\w.]+)", hint):
            assert find(told) is not None
