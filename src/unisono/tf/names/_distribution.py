"""Names of `tf.distribute` and of `tf.contrib.distribute`.

Tests: tests/unit/tf/test_names.py.
"""

from __future__ import annotations

from unisono.tf._entries import At, Entry, Missing, own, same

_RPC = Missing("is TensorFlow's generic gRPC server, which is not part of Unisono", "the package `grpcio`")

_COORDINATOR = (
    "ClusterCoordinator PerWorkerValue PerWorkerValues RemoteValue experimental_get_current_worker_index"
)

DISTRIBUTE: dict[str, Entry] = {
    **same(
        "", "unisono.",
        "CrossDeviceOps DistributedDataset DistributedIterator DistributedValues "
        "HierarchicalCopyAllReduce InputContext InputOptions InputReplicationMode MirroredStrategy "
        "MultiWorkerMirroredStrategy NcclAllReduce OneDeviceStrategy ParameterServerStrategy ReduceOp "
        "ReductionToOneDevice ReplicaContext RunOptions Server Strategy StrategyExtended TPUStrategy "
        "experimental_set_strategy get_replica_context get_strategy has_strategy in_cross_replica_context",
    ),
    **same(
        "cluster_resolver.", "unisono.cluster_resolver.",
        "ClusterResolver GCEClusterResolver KubernetesClusterResolver KubernetesExecutableLocation "
        "SimpleClusterResolver SlurmClusterResolver TFConfigClusterResolver TPUClusterResolver "
        "UnionResolver UnionClusterResolver",
    ),
    "cluster_resolver.TPUClusterResolver": At(
        "unisono.cluster_resolver.TPUClusterResolver",
        note="needs TPUs on this machine; `devices=['cpu:0', 'cpu:1']` tries a program without",
    ),
    **same("coordinator.", "unisono.coordinator.", _COORDINATOR),
    **same("experimental.coordinator.", "unisono.coordinator.", _COORDINATOR),
    **same(
        "experimental.", "unisono.experimental.",
        "CentralStorageStrategy CollectiveCommunication CollectiveHints CommunicationImplementation "
        "CommunicationOptions MultiWorkerMirroredStrategy ParameterServerStrategy "
        "PreemptionCheckpointHandler PreemptionWatcher TPUStrategy TerminationConfig ValueContext",
    ),
    **same(
        "experimental.partitioners.", "unisono.partitioners.",
        "FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner Partitioner",
    ),
    "experimental.rpc": _RPC,
    "get_loss_reduction": Missing("belongs to TensorFlow 1", "`unisono.nn.compute_average_loss`"),
}  # fmt: skip

#: `tf.contrib.distribute` of 2018.
CONTRIB: dict[str, Entry] = {
    "MirroredStrategy": own("_contrib.mirrored"),
    "CollectiveAllReduceStrategy": own("_contrib.collective_all_reduce"),
    "ParameterServerStrategy": own("_contrib.parameter_server"),
    "OneDeviceStrategy": own("_contrib.one_device"),
    "TPUStrategy": own("_contrib.tpu"),
    "DistributeConfig": At("unisono.estimator.DistributeConfig"),
    "DistributionStrategy": At("unisono.Strategy"),
    "CrossTowerOps": At("unisono.CrossDeviceOps"),
    "AllReduceCrossTowerOps": own("_contrib.all_reduce_ops"),
    "ReductionToOneDeviceCrossTowerOps": At("unisono.ReductionToOneDevice"),
    "TowerContext": At("unisono.ReplicaContext"),
    "get_tower_context": At("unisono.get_replica_context"),
    "get_cross_tower_context": At("unisono.in_cross_replica_context"),
    "get_distribution_strategy": At("unisono.get_strategy"),
    "has_distribution_strategy": At("unisono.has_strategy"),
    "run_standard_tensorflow_server": At("unisono.run_standard_server"),
    "get_loss_reduction": Missing("belongs to TensorFlow 1", "`unisono.nn.compute_average_loss`"),
    "require_tower_context": Missing("is gone", "`unisono.get_replica_context() is not None`"),
    "UpdateContext": Missing("is gone", "`strategy.extended.update(variable, fn)`"),
    "Monitor": Missing("is gone", "a loop around `strategy.run`"),
    "Step": Missing("is gone", "`strategy.run`"),
    "StandardInputStep": Missing("is gone", "`strategy.run`"),
    "StandardSingleLossStep": Missing("is gone", "`strategy.run`"),
}

DISTRIBUTION: dict[str, Entry] = {
    **{f"distribute.{name}": entry for name, entry in DISTRIBUTE.items()},
    **{f"contrib.distribute.{name}": entry for name, entry in CONTRIB.items()},
}
