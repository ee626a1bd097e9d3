"""Names of data, checkpoints, summaries, files, devices and random numbers, and Keras' old names.

Tests: tests/unit/tf/test_names.py.
"""

from __future__ import annotations

from unisono.tf._entries import At, Entry, Missing, Op

_FILES = [
    "copy", "exists", "glob", "isdir", "listdir", "makedirs", "mkdir", "remove", "rename", "rmtree",
    "stat", "walk",
]  # fmt: skip

DATA: dict[str, Entry] = {
    **{
        f"data.{name}": At(f"unisono.data.{name}")
        for name in (
            "AUTOTUNE", "Dataset", "INFINITE_CARDINALITY", "Options", "TFRecordDataset", "TextLineDataset",
            "UNKNOWN_CARDINALITY",
        )
    },
    **{
        f"data.experimental.{name}": At(f"unisono.data.experimental.{name}")
        for name in (
            "AutoShardPolicy", "AUTOTUNE", "assert_cardinality", "cardinality", "get_single_element",
            "group_by_window", "ignore_errors", "map_and_batch", "parallel_interleave", "prefetch_to_device",
            "rejection_resample", "sample_from_datasets", "scan", "shuffle_and_repeat", "take_while",
            "unbatch", "unique",
        )
    },
    "data.experimental.DistributeOptions": At("unisono.data._options.DistributeOptions"),
    "data.experimental.INFINITE_CARDINALITY": At("unisono.data.INFINITE_CARDINALITY"),
    "data.experimental.UNKNOWN_CARDINALITY": At("unisono.data.UNKNOWN_CARDINALITY"),
    "data.experimental.SHARD_HINT": At("unisono.data.SHARD_HINT"),
    "data.FixedLengthRecordDataset": Missing(
        "is not among the readers here", "`Dataset.from_generator` around a file's `read`"
    ),
    "errors.OutOfRangeError": At("unisono.OutOfRangeError"),
    "errors.UnavailableError": At("unisono.ClusterError"),
    "errors.AbortedError": At("unisono.ClusterError"),
    "errors.CancelledError": At("unisono.CancelledError"),
    "errors.InvalidArgumentError": At("unisono.InvalidArgumentError"),
    "errors.NotFoundError": At("builtins.FileNotFoundError"),
    "errors.OpError": At("unisono.UnisonoError"),
    "autograph.experimental.set_loop_options": At("unisono.tf._tensors.no_op"),
    "autograph.experimental.do_not_convert": At("unisono.tf._tensors.same"),
    "autograph.set_verbosity": At("unisono.tf._tensors.no_op"),
}  # fmt: skip

SAVING: dict[str, Entry] = {
    "train.Checkpoint": At("unisono.checkpoint.Checkpoint"),
    "train.CheckpointManager": At("unisono.tf._saving.CheckpointManagerV2"),
    "train.latest_checkpoint": At("unisono.tf._saving.latest_checkpoint"),
    "train.list_variables": At("unisono.checkpoint.list_variables"),
    "train.load_checkpoint": At("unisono.checkpoint.load_checkpoint"),
    "train.ClusterSpec": At("unisono.cluster_resolver.ClusterSpec"),
    "train.GradientDescentOptimizer": Op("keras.optimizers.SGD", tensors=0),
    "train.MomentumOptimizer": Op(
        "keras.optimizers.SGD", {"use_nesterov": "nesterov"}, ("learning_rate", "momentum"), tensors=0
    ),
    "train.AdamOptimizer": Op(
        "keras.optimizers.Adam",
        {"beta1": "beta_1", "beta2": "beta_2"},
        ("learning_rate", "beta_1", "beta_2", "epsilon"),
        {"epsilon": 1e-8},
        tensors=0,
    ),
    "compat.v1.ConfigProto": At("unisono.tf._keras.SaveOptions", note="its values have no meaning here"),
    "ConfigProto": At("unisono.tf._keras.SaveOptions", note="its values have no meaning here"),
    "train.experimental.PythonState": Missing(
        "has no counterpart", "an object with `get_config`-like state as a `unisono.Variable`"
    ),
    "saved_model.save": At(
        "unisono.tf._saving.save_model", note="writes Keras models, to a directory of `unisono.export`"
    ),
    "saved_model.load": At(
        "unisono.tf._saving.load_model", note="returns the model, with `signatures` for its inference"
    ),
    "saved_model.SaveOptions": At("unisono.tf._keras.SaveOptions"),
    "saved_model.LoadOptions": At("unisono.tf._keras.SaveOptions"),
    "summary.create_file_writer": At("unisono.summary.create_file_writer"),
    **{
        f"summary.{name}": At(f"unisono.summary.{name}")
        for name in ("create_noop_writer", "histogram", "image", "record_if", "scalar", "text")
    },
    "summary.should_record_summaries": Missing("has no counterpart", "`unisono.summary.record_if`"),
    "summary.trace_on": Missing("belongs to graphs", "`keras.callbacks.TensorBoard(profile_batch=…)`"),
    "summary.experimental.set_step": At("unisono.summary.set_step"),
    "summary.experimental.get_step": At("unisono.summary.get_step"),
    **{f"io.gfile.{name}": At(f"unisono.tf._files.{name}") for name in _FILES},
    "io.gfile.GFile": At("unisono.tf._files.GFile"),
    "gfile.GFile": At("unisono.tf._files.GFile"),
    "io.read_file": At("unisono.tf._files.read_file"),
    "io.write_file": At("unisono.tf._files.write_file"),
    "io.decode_image": At("unisono.tf._files.decode_image"),
    "io.decode_jpeg": At("unisono.tf._files.decode_image"),
    "io.decode_png": At("unisono.tf._files.decode_image"),
}

DEVICES: dict[str, Entry] = {
    "config.list_physical_devices": At("unisono.tf._config.list_physical_devices"),
    "config.experimental.list_physical_devices": At("unisono.tf._config.list_physical_devices"),
    "config.list_logical_devices": At("unisono.tf._config.list_logical_devices"),
    "config.experimental.list_logical_devices": At("unisono.tf._config.list_logical_devices"),
    "config.get_visible_devices": At("unisono.tf._config.list_physical_devices"),
    "config.set_visible_devices": At("unisono.tf._config.set_visible_devices"),
    "config.experimental.set_visible_devices": At("unisono.tf._config.set_visible_devices"),
    "config.LogicalDeviceConfiguration": At("unisono.tf._config.LogicalDeviceConfiguration"),
    "config.experimental.VirtualDeviceConfiguration": At("unisono.tf._config.LogicalDeviceConfiguration"),
    "config.set_logical_device_configuration": At("unisono.tf._config.set_logical_device_configuration"),
    "config.experimental.set_virtual_device_configuration": At(
        "unisono.tf._config.set_logical_device_configuration"
    ),
    "config.experimental.set_memory_growth": At("unisono.tf._config.set_memory_growth"),
    "config.run_functions_eagerly": At("unisono.tf._config.run_functions_eagerly"),
    "config.set_soft_device_placement": At("unisono.tf._tensors.no_op"),
    "config.optimizer.set_jit": At("unisono.tf._tensors.no_op"),
    "config.threading.set_inter_op_parallelism_threads": At("unisono.tf._tensors.no_op"),
    "config.threading.set_intra_op_parallelism_threads": At("unisono.tf._tensors.no_op"),
    "config.experimental_connect_to_cluster": At("unisono.tpu.experimental_connect_to_cluster"),
    "config.experimental.enable_op_determinism": At("unisono.tf._tensors.no_op"),
    "test.is_gpu_available": At("unisono.tf._config.is_gpu_available"),
    "tpu.experimental.initialize_tpu_system": At("unisono.tpu.experimental.initialize_tpu_system"),
    "tpu.experimental.shutdown_tpu_system": At("unisono.tpu.experimental.shutdown_tpu_system"),
    "debugging.set_log_device_placement": At("unisono.tf._tensors.no_op"),
    "debugging.assert_equal": At("unisono.tf._operations.assert_equal"),
    "get_logger": At("unisono.tf._config.get_logger"),
    "logging.set_verbosity": At("unisono.tf._tensors.no_op"),
    "logging.info": At("logging.info"),
    "sysconfig.get_build_info": Missing("belongs to TensorFlow's build", "`jax.print_environment_info()`"),
}

RANDOM: dict[str, Entry] = {
    "random.set_seed": At("keras.utils.set_random_seed"),
    "random.normal": At("unisono.tf._random.normal"),
    "random.uniform": At("unisono.tf._random.uniform"),
    "random.truncated_normal": At("unisono.tf._random.truncated_normal"),
    "random.shuffle": Op("keras.random.shuffle", {"value": "x"}),
    "random.categorical": Op("keras.random.categorical"),
    "random.stateless_normal": Missing("has no counterpart", "`keras.random.normal(shape, seed=…)`"),
    "random.stateless_uniform": Missing("has no counterpart", "`keras.random.uniform(shape, seed=…)`"),
    "random.Generator": Missing("has no counterpart", "`keras.random.SeedGenerator`, given as `seed=`"),
    "random_normal_initializer": At("keras.initializers.RandomNormal"),
    "random_uniform_initializer": At("keras.initializers.RandomUniform"),
    "zeros_initializer": At("keras.initializers.Zeros"),
    "ones_initializer": At("keras.initializers.Ones"),
    "constant_initializer": At("keras.initializers.Constant"),
    "truncated_normal_initializer": At("keras.initializers.TruncatedNormal"),
    "initializers.GlorotUniform": At("keras.initializers.GlorotUniform"),
    "image.resize": At("unisono.tf._images.resize", note='"bicubic" has another kernel in Keras'),
    "image.random_flip_left_right": At("unisono.tf._images.random_flip_left_right"),
    "image.flip_left_right": At("unisono.tf._images.flip_left_right"),
    "image.random_crop": At("unisono.tf._images.random_crop"),
    "image.convert_image_dtype": At("unisono.tf._images.convert_image_dtype"),
    "image.per_image_standardization": At("unisono.tf._images.per_image_standardization"),
    "image.grayscale_to_rgb": At("unisono.tf._images.grayscale_to_rgb"),
    "image.rgb_to_grayscale": Op("keras.ops.image.rgb_to_grayscale"),
}

KERAS: dict[str, Entry] = {
    **{
        f"keras.layers.{prefix}{name}": At(f"unisono.preprocessing.{name}")
        for prefix in ("", "experimental.preprocessing.")
        for name in ("HashedCrossing", "Hashing", "IntegerLookup", "StringLookup")
    },
    "keras.layers.TextVectorization": Missing(
        "computes with TensorFlow itself in Keras 3",
        "`str.split` and `unisono.preprocessing.StringLookup` in `Dataset.map`",
    ),
    "keras.models.load_model": At("unisono.tf._keras.load_model"),
    "keras.saving.load_model": At("unisono.tf._keras.load_model"),
    "keras.backend.get_value": At("unisono.tf._keras.get_value"),
    "keras.backend.set_value": At("unisono.tf._keras.set_value"),
    "keras.experimental.export_saved_model": At("unisono.experimental.export_saved_model"),
    "keras.experimental.load_from_saved_model": At("unisono.experimental.load_from_saved_model"),
    "keras.callbacks.BackupAndRestore": At("unisono.callbacks.BackupAndRestore"),
    "keras.callbacks.experimental.BackupAndRestore": At("unisono.callbacks.BackupAndRestore"),
    "keras.callbacks.TensorBoard": At("unisono.callbacks.TensorBoard"),
    "keras.callbacks.ModelCheckpoint": At("unisono.tf._keras.ModelCheckpoint"),
    "keras.losses.Reduction": At("unisono.tf._keras.Reduction"),
    "keras.utils.experimental.DatasetCreator": At("unisono.data.DatasetCreator"),
    "keras.layers.experimental.SyncBatchNormalization": At("unisono.tf._keras.SyncBatchNormalization"),
    "keras.layers.experimental.preprocessing.Rescaling": At("keras.layers.Rescaling"),
    "keras.layers.experimental.preprocessing.Normalization": At("keras.layers.Normalization"),
    "keras.mixed_precision.Policy": At("keras.dtype_policies.DTypePolicy"),
    "keras.mixed_precision.set_global_policy": At("keras.config.set_dtype_policy"),
    "keras.mixed_precision.global_policy": At("keras.config.dtype_policy"),
    "keras.mixed_precision.LossScaleOptimizer": At("keras.optimizers.LossScaleOptimizer"),
    "keras.mixed_precision.experimental.Policy": At("keras.dtype_policies.DTypePolicy"),
    "keras.mixed_precision.experimental.set_policy": At("keras.config.set_dtype_policy"),
    "keras.optimizers.legacy.Adam": At("keras.optimizers.Adam"),
    "keras.optimizers.legacy.SGD": At("keras.optimizers.SGD"),
    "keras.optimizers.legacy.RMSprop": At("keras.optimizers.RMSprop"),
    "keras.optimizers.legacy.Adagrad": At("keras.optimizers.Adagrad"),
    "keras.estimator.model_to_estimator": Missing(
        "belongs to the Estimator, which Unisono does not have yet", "`model.fit`"
    ),
    "optimizers.Adam": At("keras.optimizers.Adam"),
    "initializers": At("keras.initializers"),
    "losses": At("keras.losses"),
    "metrics": At("keras.metrics"),
    "optimizers": At("keras.optimizers"),
}

PROGRAMS: dict[str, Entry] = {**DATA, **SAVING, **DEVICES, **RANDOM, **KERAS}
