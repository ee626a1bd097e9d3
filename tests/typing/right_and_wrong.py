"""What a type checker says of programs: `make types` checks this file, and an error that is missing fails it.

It is not run. `warn_unused_ignores` makes an `ignore` whose line has no such error an error itself.
"""

from typing import assert_type

import unisono
from unisono import partitioners, tf

strategy = unisono.MirroredStrategy()
assert_type(strategy, unisono.MirroredStrategy)
assert_type(strategy.num_replicas_in_sync, int)
assert_type(unisono.data.Dataset.range(3), unisono.data.Dataset)
assert_type(partitioners.FixedShardsPartitioner(2), partitioners.FixedShardsPartitioner)
assert_type(unisono.cluster_resolver.resolve({}), unisono.cluster_resolver.ClusterResolver | None)

# Names that do not exist.
strategy.rum()  # type: ignore[attr-defined]
unisono.MirroredStrategi()  # type: ignore[attr-defined]
unisono.data.Datset  # type: ignore[attr-defined]
unisono.callbacks.BackupAndRestor  # type: ignore[attr-defined]
unisono.checkpoint.Chekpoint  # type: ignore[attr-defined]
unisono.cluster_resolver.SlurmResolver  # type: ignore[attr-defined]
unisono.coordinator.Coordinator  # type: ignore[attr-defined]
unisono.estimator.Estimater  # type: ignore[attr-defined]
unisono.estimator.hooks.Hook  # type: ignore[attr-defined]
unisono.estimator.layers.densee  # type: ignore[attr-defined]
unisono.estimator.losses.square  # type: ignore[attr-defined]
unisono.estimator.metrics.acuracy  # type: ignore[attr-defined]
unisono.estimator.train.Adam  # type: ignore[attr-defined]
unisono.experimental.Foo  # type: ignore[attr-defined]
unisono.export.exprt  # type: ignore[attr-defined]
unisono.feature_column.column  # type: ignore[attr-defined]
unisono.standalone.serve  # type: ignore[attr-defined]
unisono.tpu.connect  # type: ignore[attr-defined]
unisono.tpu.experimental.Foo  # type: ignore[attr-defined]
partitioners.Foo  # type: ignore[attr-defined]

# Arguments of the wrong kind.
unisono.MirroredStrategy(gpus=2)  # type: ignore[call-arg]
unisono.export.export(None, "model", formt="keras")  # type: ignore[call-arg]
unisono.experimental.coordinator.ClusterCoordinator(strategy)  # type: ignore[arg-type]

# Names of a data set, whose base class has no types.
unisono.data.Dataset.range(3).shuffle(3).batch(2, drop_remainder=True)
unisono.data.Dataset.range(3).shufle(3)  # type: ignore[attr-defined]
for batch in unisono.data.Dataset.range(3):
    print(batch)

# TensorFlow's names.
assert_type(tf.distribute.MirroredStrategy(), unisono.MirroredStrategy)
assert_type(tf.data.Dataset.range(3), unisono.data.Dataset)
tf.keras.Sequential([tf.keras.layers.Dense(1)]).compile("adam", tf.keras.losses.MeanSquaredError())
tf.reduce_sum(tf.constant([1.0]), axis=0, keepdims=True, name="sum")
tf.distribute.MirroredStrategi()  # type: ignore[attr-defined]
tf.distribute.MirroredStrategy(gpus=2)  # type: ignore[call-arg]
tf.keras.layers.Dens(1)  # type: ignore[attr-defined]
tf.data.Dataset.range(3).shufle(3)  # type: ignore[attr-defined]
tf.reduce_summ([1.0])  # type: ignore[attr-defined]
tf.reduce_sum([1.0], keepdims="yes")  # type: ignore[arg-type]
tf.reduce_sum([1.0], axes=0)  # type: ignore[call-arg]
tf.compat.v1.train.AdamOptimiser()  # type: ignore[attr-defined]
tf.lite.TFLiteConverter  # type: ignore[attr-defined]

# Strings of which there are few.
unisono.MirroredStrategy(state_layout="sharded").reduce("sum", 1.0, axis=None)
unisono.Variable(0.0, synchronization="on_read", aggregation="sum")
unisono.MirroredStrategy(state_layout="shared")  # type: ignore[arg-type]
unisono.MirroredStrategy().reduce("max", 1.0, axis=None)  # type: ignore[arg-type]
unisono.CommunicationOptions(implementation="gloo")  # type: ignore[arg-type]
unisono.Variable(0.0, aggregation="max")  # type: ignore[arg-type]
unisono.CompressedAllReduce("int4")  # type: ignore[arg-type]
unisono.export.export(None, "model", "h5")  # type: ignore[arg-type]
