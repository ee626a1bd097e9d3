"""The table of names: entries lead somewhere, the page shows them, tutorials find their names."""

import pytest

from unisono.tf._entries import Missing
from unisono.tf._table import TABLE

#: Names in TensorFlow's tutorials on distribution, and in the guides that they link to.
TUTORIALS = [
    "GradientTape", "Variable", "cast", "config.experimental_connect_to_cluster",
    "config.list_logical_devices", "config.list_physical_devices", "config.run_functions_eagerly",
    "constant", "data.AUTOTUNE", "data.Dataset", "data.Options", "data.experimental.AutoShardPolicy",
    "distribute.InputContext", "distribute.InputOptions", "distribute.MirroredStrategy",
    "distribute.MultiWorkerMirroredStrategy", "distribute.OneDeviceStrategy",
    "distribute.ParameterServerStrategy", "distribute.ReduceOp", "distribute.Server",
    "distribute.TPUStrategy", "distribute.cluster_resolver.SimpleClusterResolver",
    "distribute.cluster_resolver.TFConfigClusterResolver",
    "distribute.cluster_resolver.TPUClusterResolver", "distribute.coordinator.ClusterCoordinator",
    "distribute.experimental.CommunicationImplementation",
    "distribute.experimental.CommunicationOptions",
    "distribute.experimental.PreemptionCheckpointHandler", "distribute.experimental.TerminationConfig",
    "distribute.experimental.partitioners.MinSizePartitioner", "distribute.get_replica_context",
    "distribute.get_strategy", "distribute.in_cross_replica_context", "float32", "function",
    "io.gfile.exists", "io.gfile.makedirs", "io.gfile.rmtree", "keras.Input", "keras.Model",
    "keras.Sequential", "keras.callbacks.BackupAndRestore", "keras.callbacks.LearningRateScheduler",
    "keras.callbacks.ModelCheckpoint", "keras.callbacks.TensorBoard", "keras.datasets.mnist",
    "keras.layers.Conv2D", "keras.losses.BinaryCrossentropy", "keras.losses.Reduction",
    "keras.losses.SparseCategoricalCrossentropy", "keras.metrics.Mean", "keras.models.load_model",
    "keras.optimizers.Adam", "keras.optimizers.legacy.Adam", "keras.utils.experimental.DatasetCreator",
    "keras.utils.set_random_seed", "math.reduce_mean", "nn.compute_average_loss",
    "nn.scale_regularization_loss", "random.set_seed", "range", "reduce_mean", "reduce_sum", "reshape",
    "saved_model.SaveOptions", "saved_model.load", "saved_model.save",
    "tpu.experimental.initialize_tpu_system", "train.Checkpoint", "train.CheckpointManager",
    "train.ClusterSpec", "train.latest_checkpoint",
]  # fmt: skip


def test_every_entry_leads_somewhere():
    for name, entry in TABLE.entries.items():
        if isinstance(entry, Missing):
            assert entry.why, name
            assert entry.write, name
        else:
            try:
                entry.load()
            except Exception as error:
                pytest.fail(f"{name}: {error!r}")


def test_names_of_the_tutorials_work():
    assert not [name for name in TUTORIALS if TABLE.find("tf", name) is None]
