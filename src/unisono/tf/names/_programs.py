"""Names of data, checkpoints, summaries, files, devices and random numbers, and Keras' old names.

Tests: tests/unit/tf/test_names.py.
"""

from __future__ import annotations

from unisono.tf._entries import At, Entry, Missing, Operator, own

_FILES = [
    "copy", "exists", "glob", "isdir", "listdir", "makedirs", "mkdir", "remove", "rename", "rmtree",
    "stat", "walk",
]  # fmt: skip

_ENCODERS = ["encode_jpeg", "encode_png"]

_VARIABLE = Missing(
    "gives sparse or ragged tensors, which are not there",
    "`tf.io.FixedLenSequenceFeature([], dtype, allow_missing=True)`, and `Dataset.padded_batch`",
)
_TENSOR_BYTES = Missing(
    "has no counterpart", "`array.tobytes()` into a bytes feature, and `tf.io.decode_raw` to read it"
)

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
            "AutoShardPolicy", "AUTOTUNE", "assert_cardinality", "get_single_element",
            "group_by_window", "ignore_errors", "map_and_batch", "parallel_interleave", "prefetch_to_device",
            "rejection_resample", "sample_from_datasets", "scan", "shuffle_and_repeat", "take_while",
            "unbatch", "unique",
        )
    },
    **{
        f"compat.v1.data.{name}": own(f"_elements.{name}")
        for name in ("get_output_classes", "get_output_shapes", "get_output_types")
    },
    "data.experimental.cardinality": own("_elements.cardinality"),
    "data.experimental.DistributeOptions": At("unisono.data._options.DistributeOptions"),
    "data.experimental.INFINITE_CARDINALITY": At("unisono.data.INFINITE_CARDINALITY"),
    "data.experimental.UNKNOWN_CARDINALITY": At("unisono.data.UNKNOWN_CARDINALITY"),
    "data.experimental.SHARD_HINT": At("unisono.data.SHARD_HINT"),
    "data.experimental.Counter": At("unisono.data.Dataset.counter"),
    "data.experimental.CsvDataset": own("inputs._csv.CsvDataset"),
    "data.experimental.make_csv_dataset": own("inputs._csv.make_csv_dataset"),
    "data.experimental.dense_to_ragged_batch": Missing(
        "makes ragged tensors, which are not there", "`Dataset.padded_batch`"
    ),
    "data.FixedLengthRecordDataset": Missing(
        "is not among the readers here", "`Dataset.from_generator` around a file's `read`"
    ),
    "errors.OutOfRangeError": At("unisono.OutOfRangeError"),
    "errors.UnavailableError": At("unisono.ClusterError"),
    "errors.AbortedError": At("unisono.ClusterError"),
    "errors.AlreadyExistsError": At("builtins.FileExistsError"),
    "errors.CancelledError": At("unisono.CancelledError"),
    "errors.FailedPreconditionError": At("unisono.ContextError"),
    "errors.PermissionDeniedError": At("builtins.PermissionError"),
    "errors.UnimplementedError": At("unisono.UnsupportedError"),
    "errors.InvalidArgumentError": At("unisono.InvalidArgumentError"),
    "errors.NotFoundError": At("builtins.FileNotFoundError"),
    "errors.OpError": At("unisono.UnisonoError"),
    "autograph.experimental.set_loop_options": own("_tensors.no_op"),
    "autograph.experimental.do_not_convert": own("_tensors.same"),
    "autograph.experimental.Feature": Missing("belongs to AutoGraph", "`tf.cond` and `tf.while_loop`"),
    "autograph.to_code": Missing("belongs to AutoGraph", "`jax.make_jaxpr(f)(*args)`"),
    "autograph.to_graph": Missing("belongs to AutoGraph", "`tf.cond` and `tf.while_loop`"),
    "autograph.set_verbosity": own("_tensors.no_op"),
    "autograph.trace": own("_tensors.no_op"),
}  # fmt: skip

SAVING: dict[str, Entry] = {
    "train.Checkpoint": At("unisono.checkpoint.Checkpoint"),
    "train.CheckpointManager": own("_saving.CheckpointManagerV2"),
    "train.latest_checkpoint": own("_saving.latest_checkpoint"),
    "train.list_variables": At("unisono.checkpoint.list_variables"),
    "train.load_checkpoint": At("unisono.checkpoint.load_checkpoint"),
    "train.ClusterSpec": At("unisono.cluster_resolver.ClusterSpec"),
    "compat.v1.ConfigProto": own("_keras.SaveOptions", note="its values have no meaning here"),
    "ConfigProto": own("_keras.SaveOptions", note="its values have no meaning here"),
    "train.experimental.PythonState": Missing(
        "has no counterpart", "an object with `get_config`-like state as a `unisono.Variable`"
    ),
    "saved_model.save": own(
        "_saving.save_model",
        note="writes Keras models and modules, in Unisono's own format",
    ),
    "saved_model.load": own(
        "_saving.load_model",
        note="returns the model with `signatures`, or the module",
    ),
    "saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY": own("_saving.SERVING"),
    "saved_model.SaveOptions": own("_keras.SaveOptions"),
    "saved_model.LoadOptions": own("_keras.SaveOptions"),
    "summary.create_file_writer": At("unisono.summary.create_file_writer"),
    **{f"summary.{name}": At(f"unisono.summary.{name}") for name in ("create_noop_writer", "record_if")},
    "summary.should_record_summaries": Missing("has no counterpart", "`unisono.summary.record_if`"),
    **{
        f"summary.trace_{name}": own("_tensors.no_op", note="does nothing: there is no graph to show")
        for name in ("on", "export", "off")
    },
    "summary.graph": Missing("belongs to graphs", "`keras.callbacks.TensorBoard(profile_batch=…)`"),
    "profiler.experimental.start": At("jax.profiler.start_trace"),
    "profiler.experimental.stop": At("jax.profiler.stop_trace"),
    "profiler.experimental.Profile": At("jax.profiler.trace"),
    "profiler.experimental.server.start": At("jax.profiler.start_server"),
    "summary.experimental.set_step": At("unisono.summary.set_step"),
    "summary.experimental.get_step": At("unisono.summary.get_step"),
    **{f"io.gfile.{name}": own(f"_files.{name}") for name in _FILES},
    "io.gfile.GFile": own("_files.GFile"),
    "gfile.GFile": own("_files.GFile"),
    "io.read_file": own("_files.read_file"),
    "io.write_file": own("_files.write_file"),
    **{
        f"{module}{name}": own(f"_records.{name}")
        for module in ("", "io.")
        for name in (
            "FixedLenFeature",
            "FixedLenSequenceFeature",
            "decode_raw",
            "parse_example",
            "parse_single_example",
        )
    },
    **{
        f"train.{name}": own(f"_records.{name}")
        for name in (
            "BytesList",
            "Example",
            "Feature",
            "FeatureList",
            "FeatureLists",
            "Features",
            "FloatList",
            "Int64List",
            "SequenceExample",
        )
    },
    "io.TFRecordWriter": own("_records.TFRecordWriter"),
    "python_io.TFRecordWriter": own("_records.TFRecordWriter"),
    **dict.fromkeys(("io.VarLenFeature", "VarLenFeature", "io.SparseFeature", "io.RaggedFeature"), _VARIABLE),
    **dict.fromkeys(("io.serialize_tensor", "io.parse_tensor"), _TENSOR_BYTES),
    "io.parse_single_sequence_example": Missing(
        "has no counterpart", "`tf.train.SequenceExample.FromString(record)` in `Dataset.map`"
    ),
    "io.TFRecordOptions": Missing("belongs to compressed files", "uncompressed TFRecord files"),
    "io.decode_csv": own("inputs._csv.decode_csv"),
    "audio.decode_wav": own("inputs._audio.decode_wav"),
    "audio.encode_wav": Missing("has no counterpart", "Python's `wave`"),
    "io.match_filenames_once": Missing("belongs to graphs", "`tf.io.gfile.glob`"),
    "io.decode_image": own("_files.decode_image"),
    "io.decode_jpeg": own("_files.decode_image"),
    "io.decode_png": own("_files.decode_image"),
}

DEVICES: dict[str, Entry] = {
    "config.list_physical_devices": own("_config.list_physical_devices"),
    "config.experimental.list_physical_devices": own("_config.list_physical_devices"),
    "config.list_logical_devices": own("_config.list_logical_devices"),
    "config.experimental.list_logical_devices": own("_config.list_logical_devices"),
    "config.get_visible_devices": own("_config.list_physical_devices"),
    "config.set_visible_devices": own("_config.set_visible_devices"),
    "config.experimental.set_visible_devices": own("_config.set_visible_devices"),
    "config.LogicalDeviceConfiguration": own("_config.LogicalDeviceConfiguration"),
    "config.experimental.VirtualDeviceConfiguration": own("_config.LogicalDeviceConfiguration"),
    "config.set_logical_device_configuration": own("_config.set_logical_device_configuration"),
    "config.experimental.set_virtual_device_configuration": own("_config.set_logical_device_configuration"),
    "config.experimental.set_memory_growth": own("_config.set_memory_growth"),
    "config.run_functions_eagerly": own("_config.run_functions_eagerly"),
    "config.set_soft_device_placement": own("_tensors.no_op"),
    "config.optimizer.set_jit": own("_tensors.no_op"),
    "config.threading.set_inter_op_parallelism_threads": own("_tensors.no_op"),
    "config.threading.set_intra_op_parallelism_threads": own("_tensors.no_op"),
    "config.experimental_connect_to_cluster": At("unisono.tpu.experimental_connect_to_cluster"),
    "config.experimental.enable_op_determinism": own("_tensors.no_op"),
    "test.is_gpu_available": own("_config.is_gpu_available"),
    "tpu.experimental.initialize_tpu_system": At("unisono.tpu.experimental.initialize_tpu_system"),
    "tpu.experimental.shutdown_tpu_system": At("unisono.tpu.experimental.shutdown_tpu_system"),
    "debugging.set_log_device_placement": own("_tensors.no_op"),
    "config.optimizer.get_experimental_options": Missing(
        "belongs to graphs", "`jax.jit(f).lower(*args).compile()`, which XLA optimizes"
    ),
    "config.optimizer.set_experimental_options": own("_tensors.no_op"),
    "debugging.check_numerics": Missing("has no counterpart", '`jax.config.update("jax_debug_nans", True)`'),
    "debugging.enable_check_numerics": Missing(
        "has no counterpart", '`jax.config.update("jax_debug_nans", True)`'
    ),
    "debugging.assert_equal": own("_operations.assert_equal"),
    "get_logger": own("_config.get_logger"),
    "sysconfig.get_build_info": Missing("belongs to TensorFlow's build", "`jax.print_environment_info()`"),
}

RANDOM: dict[str, Entry] = {
    "random.set_seed": own("_random.set_seed"),
    "random.normal": own("_random.normal"),
    "random.uniform": own("_random.uniform"),
    "random.truncated_normal": own("_random.truncated_normal"),
    "random.shuffle": Operator("keras.random.shuffle", {"value": "x"}),
    "random.categorical": own("_random.categorical"),
    **{
        f"random.{name}": own(f"numbers._stateless.{ours}", note="the numbers are JAX's")
        for name, ours in {
            "Generator": "RandomGenerator",
            "experimental.Generator": "RandomGenerator",
            "experimental.stateless_split": "split",
            "get_global_generator": "get_global_generator",
            "set_global_generator": "set_global_generator",
            "split": "split",
            "stateless_normal": "normal",
            "stateless_truncated_normal": "truncated_normal",
            "stateless_uniform": "uniform",
        }.items()
    },
    "random_normal_initializer": At("keras.initializers.RandomNormal"),
    "random_uniform_initializer": At("keras.initializers.RandomUniform"),
    "zeros_initializer": At("keras.initializers.Zeros"),
    "ones_initializer": At("keras.initializers.Ones"),
    "constant_initializer": At("keras.initializers.Constant"),
    "truncated_normal_initializer": At("keras.initializers.TruncatedNormal"),
    "initializers.GlorotUniform": At("keras.initializers.GlorotUniform"),
    "image.resize": own("_images.resize", note='"bicubic" has another kernel in Keras'),
    "image.random_flip_left_right": own("_images.random_flip_left_right"),
    "image.flip_left_right": own("_images.flip_left_right"),
    "image.random_crop": own("_images.random_crop"),
    "image.extract_patches": own("_images.extract_patches"),
    "image.convert_image_dtype": own("_images.convert_image_dtype"),
    "image.per_image_standardization": own("_images.per_image_standardization"),
    "image.grayscale_to_rgb": own("_images.grayscale_to_rgb"),
    "image.rgb_to_grayscale": Operator("keras.ops.image.rgb_to_grayscale"),
    **{
        f"image.{name}": own(f"_images.{name}")
        for name in (
            "central_crop",
            "crop_to_bounding_box",
            "flip_up_down",
            "pad_to_bounding_box",
            "random_flip_up_down",
            "resize_with_crop_or_pad",
            "rot90",
            "transpose",
        )
    },
    "image.resize_image_with_crop_or_pad": own("_images.resize_with_crop_or_pad"),
    "image.resize_images": own("_images.resize", note='"bicubic" has another kernel in Keras'),
    **{
        f"image.{name}": own(f"_colors.{name}")
        for name in (
            "adjust_brightness",
            "adjust_contrast",
            "adjust_gamma",
            "adjust_hue",
            "adjust_saturation",
            "hsv_to_rgb",
            "random_brightness",
            "random_contrast",
            "random_hue",
            "random_saturation",
            "rgb_to_hsv",
        )
    },
    **{
        f"image.stateless_{name}": own(f"numbers._stateless.{name}", note="the numbers are JAX's")
        for name in (
            "random_brightness",
            "random_contrast",
            "random_crop",
            "random_flip_left_right",
            "random_flip_up_down",
            "random_hue",
            "random_saturation",
        )
    },
    **{f"image.{name}": own("_files.decode_image") for name in ("decode_image", "decode_jpeg", "decode_png")},
    **{f"{module}.{name}": own(f"_files.{name}") for module in ("image", "io") for name in _ENCODERS},
    "image.ResizeMethod": own("_images.ResizeMethod"),
    "image.total_variation": own("_indexing.total_variation"),
    "image.sobel_edges": Missing("has no counterpart", "`keras.ops.depthwise_conv` with Sobel's kernels"),
    "image.sample_distorted_bounding_box": Missing(
        "has no counterpart", "`tf.keras.layers.RandomCrop`, or `tf.image.random_crop`"
    ),
    "image.resize_with_pad": own("_images.resize_with_pad"),
}

KERAS: dict[str, Entry] = {
    **{
        f"keras.layers.{prefix}{name}": At(f"unisono.preprocessing.{name}")
        for prefix in ("", "experimental.preprocessing.")
        for name in ("HashedCrossing", "Hashing", "IntegerLookup", "StringLookup", "TextVectorization")
    },
    "keras.Input": own("_keras.input_of"),
    "keras.layers.Input": own("_keras.input_of"),
    "keras.models.load_model": own("models._loading.load_model"),
    "keras.saving.load_model": own("models._loading.load_model"),
    **{
        f"keras.utils.{name}": Missing("belongs to graphs", "layers of `tf.keras`")
        for name in ("DeterministicRandomTestTool", "get_or_create_layer", "track_tf1_style_variables")
    },
    **{
        f"keras.experimental.{name}": Missing("is gone in Keras 3", "layers of `tf.keras` and `keras.Model`")
        for name in ("LinearModel", "WideDeepModel")
    },
    "keras.backend.get_value": own("_keras.get_value"),
    "keras.backend.set_value": own("_keras.set_value"),
    "keras.experimental.export_saved_model": At("unisono.experimental.export_saved_model"),
    "keras.experimental.load_from_saved_model": At("unisono.experimental.load_from_saved_model"),
    "keras.callbacks.BackupAndRestore": At("unisono.callbacks.BackupAndRestore"),
    "keras.callbacks.experimental.BackupAndRestore": At("unisono.callbacks.BackupAndRestore"),
    "keras.callbacks.TensorBoard": At("unisono.callbacks.TensorBoard"),
    "keras.callbacks.ModelCheckpoint": own("_keras.ModelCheckpoint"),
    "keras.losses.Reduction": own("_keras.KerasReduction"),
    "keras.utils.image_dataset_from_directory": own("_directories.image_dataset_from_directory"),
    "keras.preprocessing.image_dataset_from_directory": own("_directories.image_dataset_from_directory"),
    "keras.utils.get_file": own(
        "_directories.get_file", note="an archive's files lie next to it, and in Keras 3's directory"
    ),
    "keras.utils.SidecarEvaluator": At("unisono.SidecarEvaluator"),
    "keras.experimental.SidecarEvaluator": At("unisono.SidecarEvaluator"),
    "keras.utils.experimental.DatasetCreator": At("unisono.data.DatasetCreator"),
    "keras.layers.experimental.SyncBatchNormalization": own("_keras.SyncBatchNormalization"),
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
    "optimizers.Adam": At("keras.optimizers.Adam"),
    "initializers": At("keras.initializers"),
    "optimizers": At("keras.optimizers"),
}

PROGRAMS: dict[str, Entry] = {**DATA, **SAVING, **DEVICES, **RANDOM, **KERAS}
