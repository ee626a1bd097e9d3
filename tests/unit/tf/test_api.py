"""Every name of tf.distribute's API, and of what belongs to it, is there or says what to write."""

import inspect

import pytest

import unisono
from unisono import tf

#: Modules and classes with their names: TensorFlow 2.21's, and those of `tf.contrib` of 2018.
API = """
distribute:
    Strategy StrategyExtended MirroredStrategy MultiWorkerMirroredStrategy OneDeviceStrategy
    ParameterServerStrategy TPUStrategy ReplicaContext RunOptions InputContext InputOptions
    InputReplicationMode ReduceOp CrossDeviceOps ReductionToOneDevice NcclAllReduce
    HierarchicalCopyAllReduce DistributedValues DistributedDataset DistributedIterator
    Server get_strategy has_strategy get_replica_context in_cross_replica_context
    experimental_set_strategy cluster_resolver coordinator experimental
distribute.experimental:
    CentralStorageStrategy MultiWorkerMirroredStrategy ParameterServerStrategy TPUStrategy
    CommunicationImplementation CollectiveCommunication CommunicationOptions CollectiveHints
    ValueContext PreemptionCheckpointHandler PreemptionWatcher TerminationConfig coordinator
    partitioners
distribute.experimental.coordinator:
    ClusterCoordinator RemoteValue PerWorkerValues PerWorkerValue
distribute.coordinator:
    ClusterCoordinator RemoteValue PerWorkerValues PerWorkerValue
    experimental_get_current_worker_index
distribute.experimental.partitioners:
    Partitioner FixedShardsPartitioner MinSizePartitioner MaxSizePartitioner
distribute.cluster_resolver:
    ClusterResolver SimpleClusterResolver UnionResolver UnionClusterResolver
    TFConfigClusterResolver SlurmClusterResolver KubernetesClusterResolver
    KubernetesExecutableLocation GCEClusterResolver TPUClusterResolver
compat.v1.distribute:
    get_loss_reduction MirroredStrategy
compat.v1.distribute.experimental:
    ParameterServerStrategy
contrib.distribute:
    MirroredStrategy CollectiveAllReduceStrategy ParameterServerStrategy OneDeviceStrategy
    TPUStrategy DistributeConfig DistributionStrategy run_standard_tensorflow_server
    AllReduceCrossTowerOps CrossTowerOps
    ReductionToOneDeviceCrossTowerOps TowerContext get_tower_context get_cross_tower_context
    get_distribution_strategy get_loss_reduction has_distribution_strategy
    require_tower_context UpdateContext Monitor Step StandardInputStep
    StandardSingleLossStep
distribute.Strategy:
    scope run reduce gather experimental_local_results experimental_distribute_dataset
    distribute_datasets_from_function experimental_distribute_datasets_from_function
    experimental_distribute_values_from_function num_replicas_in_sync cluster_resolver
    extended make_dataset_iterator make_input_fn_iterator experimental_run
    experimental_run_v2 unwrap group configure update_config_proto colocate_vars_with
    experimental_make_numpy_dataset
distribute.StrategyExtended:
    variable_created_in_scope colocate_vars_with reduce_to batch_reduce_to update
    value_container worker_devices parameter_devices experimental_require_static_shapes
    call_for_each_replica broadcast_to read_var update_non_slot non_slot_devices
    experimental_run_steps_on_iterator experimental_between_graph experimental_should_init
    should_checkpoint should_save_summary
distribute.ReplicaContext:
    replica_id_in_sync_group num_replicas_in_sync strategy devices merge_call all_reduce
    all_gather
distribute.ReduceOp:
    SUM MEAN
distribute.RunOptions:
    experimental_enable_dynamic_batch_size experimental_bucketizing_dynamic_shape
    experimental_xla_options
distribute.InputOptions:
    experimental_fetch_to_device experimental_replication_mode
    experimental_place_dataset_on_device experimental_per_replica_buffer_size
distribute.InputReplicationMode:
    PER_WORKER PER_REPLICA
distribute.InputContext:
    num_input_pipelines input_pipeline_id num_replicas_in_sync get_per_replica_batch_size
distribute.experimental.ValueContext:
    replica_id_in_sync_group num_replicas_in_sync
distribute.experimental.CommunicationOptions:
    bytes_per_pack timeout_seconds implementation merge
distribute.experimental.CommunicationImplementation:
    AUTO RING NCCL
distribute.DistributedDataset:
    element_spec cardinality reduce
distribute.DistributedIterator:
    get_next get_next_as_optional element_spec
distribute.CrossDeviceOps:
    reduce batch_reduce broadcast reduce_implementation batch_reduce_implementation
    broadcast_implementation
distribute.TPUStrategy:
    experimental_assign_to_logical_device experimental_split_to_logical_devices
    experimental_replicate_to_logical_devices
distribute.coordinator.ClusterCoordinator:
    schedule join done create_per_worker_dataset fetch
distribute.coordinator.RemoteValue:
    fetch get
distribute.cluster_resolver.ClusterResolver:
    cluster_spec master num_accelerators environment task_type task_id
distribute.cluster_resolver.SlurmClusterResolver:
    get_task_info
distribute.cluster_resolver.TPUClusterResolver:
    connect get_tpu_system_metadata tpu_hardware_feature
distribute.Server:
    start join target server_def
distribute.experimental.PreemptionCheckpointHandler:
    run save_checkpoint_if_preempted watch_preemption_scope total_run_calls
distribute.experimental.TerminationConfig:
    termination_watcher_fn exit_fn grace_period save_fn
estimator:
    RunConfig TrainSpec EvalSpec Estimator EstimatorSpec ModeKeys train_and_evaluate
Variable:
    assign assign_add assign_sub numpy read_value value shape dtype name
config:
    experimental_connect_to_cluster
tpu.experimental:
    initialize_tpu_system
nn:
    compute_average_loss scale_regularization_loss
train:
    Checkpoint CheckpointManager ClusterSpec Server
keras.utils.experimental:
    DatasetCreator
keras.layers.experimental:
    SyncBatchNormalization
keras.callbacks:
    ModelCheckpoint BackupAndRestore TensorBoard LearningRateScheduler EarlyStopping
    ReduceLROnPlateau
keras.mixed_precision:
    LossScaleOptimizer
VariableSynchronization:
    AUTO NONE ON_WRITE ON_READ
VariableAggregation:
    NONE SUM MEAN ONLY_FIRST_REPLICA
"""

#: Names whose errors say what to write.
ELSEWHERE = {
    "distribute.experimental.rpc": "grpcio",
    "compat.v1.distribute.get_loss_reduction": "compute_average_loss",
    "contrib.distribute.get_loss_reduction": "compute_average_loss",
    "contrib.distribute.require_tower_context": "get_replica_context",
    "contrib.distribute.UpdateContext": "extended.update",
    "contrib.distribute.Monitor": "strategy.run",
    "contrib.distribute.Step": "strategy.run",
    "contrib.distribute.StandardInputStep": "strategy.run",
    "contrib.distribute.StandardSingleLossStep": "strategy.run",
}


def api():
    """The names with their modules."""
    owner = ""
    for line in API.strip().splitlines():
        if not line.startswith(" "):
            owner = line.removesuffix(":")
        else:
            yield from (f"{owner}.{name}" for name in line.split())


def look_up(path):
    """Look up a path; what an object is made with is a name of it, too."""
    value = tf
    for part in path.split("."):
        if isinstance(value, type) and not hasattr(value, part):
            assert part in inspect.signature(value).parameters, path
            return
        value = getattr(value, part)


@pytest.mark.parametrize("path", [p for p in api() if p not in ELSEWHERE])
def test_a_name_is_there(path):
    look_up(path)


@pytest.mark.parametrize(("path", "write"), ELSEWHERE.items())
def test_a_name_that_is_elsewhere_says_what_to_write(path, write):
    with pytest.raises(AttributeError, match=f"Write: .*{write}"):
        look_up(path)


def test_servers_belong_to_a_cluster():
    with pytest.raises(unisono.UnsupportedError, match="ParameterServerStrategy"):
        tf.distribute.Server.create_local_server()
