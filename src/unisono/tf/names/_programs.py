"""Names of data, checkpoints, summaries, files, devices and random numbers, and Keras' old names.

Tests: tests/unit/tf/test_names.py.
"""

from __future__ import annotations

from unisono.tf._entries import At, Entry, Missing, Operator, own, own_operator, same

_PARSED = "decode_raw parse_example parse_single_example"
_FEATURES = "FixedLenFeature FixedLenSequenceFeature"

_VARIABLE = Missing(
    "gives sparse or ragged tensors, which are not there",
    "`tf.io.FixedLenSequenceFeature([], dtype, allow_missing=True)`, and `Dataset.padded_batch`",
)
_TENSOR_BYTES = Missing(
    "has no counterpart", "`array.tobytes()` into a bytes feature, and `tf.io.decode_raw` to read it"
)

_OF_TENSORS = "`unisono.data.{}`, whose elements have `numpy()`"

DATA: dict[str, Entry] = {
    **same(
        "data.", "unisono.data.",
        "AUTOTUNE INFINITE_CARDINALITY Options UNKNOWN_CARDINALITY",
    ),
    "data.Dataset": own("_elements.TensorDataset", _OF_TENSORS.format("Dataset")),
    "data.TextLineDataset": own("_elements.TextLineDataset", _OF_TENSORS.format("TextLineDataset")),
    "data.TFRecordDataset": own("_elements.TFRecordDataset", _OF_TENSORS.format("TFRecordDataset")),
    **same(
        "data.experimental.", "unisono.data.experimental.",
        "AutoShardPolicy AUTOTUNE assert_cardinality get_single_element group_by_window ignore_errors "
        "map_and_batch parallel_interleave prefetch_to_device rejection_resample scan "
        "shuffle_and_repeat take_while unbatch unique",
    ),
    **same(
        "compat.v1.data.", "_elements.", "get_output_classes get_output_shapes get_output_types", own
    ),
    "data.experimental.cardinality": own("_elements.cardinality"),
    "data.experimental.DistributeOptions": At("unisono.data.experimental.DistributeOptions"),
    **same(
        "data.experimental.", "unisono.data.", "INFINITE_CARDINALITY SHARD_HINT UNKNOWN_CARDINALITY"
    ),
    "data.experimental.sample_from_datasets": own("_elements.TensorDataset.sample_from_datasets"),
    "data.experimental.Counter": own("_elements.TensorDataset.counter"),
    **same("data.experimental.", "inputs._csv.", "CsvDataset make_csv_dataset", own),
    "data.experimental.dense_to_ragged_batch": Missing(
        "makes ragged tensors, which are not there", "`Dataset.padded_batch`"
    ),
    "data.FixedLengthRecordDataset": Missing(
        "is not among the readers here", "`Dataset.from_generator` around a file's `read`"
    ),
    "errors.UnavailableError": At("unisono.ClusterError"),
    "errors.AbortedError": At("unisono.ClusterError"),
    "errors.AlreadyExistsError": At("builtins.FileExistsError"),
    "errors.FailedPreconditionError": At("unisono.ContextError"),
    "errors.PermissionDeniedError": At("builtins.PermissionError"),
    "errors.UnimplementedError": At("unisono.UnsupportedError"),
    **same("errors.", "unisono.", "CancelledError InvalidArgumentError OutOfRangeError"),
    "errors.NotFoundError": At("builtins.FileNotFoundError"),
    "errors.OpError": At("unisono.UnisonoError"),
    "autograph.experimental.do_not_convert": own("_tensors.same"),
    "autograph.experimental.Feature": Missing("belongs to AutoGraph", "`tf.cond` and `tf.while_loop`"),
    "autograph.to_code": Missing("belongs to AutoGraph", "`jax.make_jaxpr(f)(*args)`"),
    "autograph.to_graph": Missing("belongs to AutoGraph", "`tf.cond` and `tf.while_loop`"),
    **dict.fromkeys(
        ("autograph.experimental.set_loop_options", "autograph.set_verbosity", "autograph.trace"),
        own("_tensors.no_op"),
    ),
}  # fmt: skip

SAVING: dict[str, Entry] = {
    "train.CheckpointManager": own("_saving.CheckpointManagerV2"),
    "train.latest_checkpoint": own("_saving.latest_checkpoint"),
    **same("train.", "unisono.checkpoint.", "Checkpoint list_variables load_checkpoint"),
    "train.ClusterSpec": At("unisono.cluster_resolver.ClusterSpec"),
    **dict.fromkeys(
        ("ConfigProto", "compat.v1.ConfigProto"),
        own("_keras.SaveOptions", note="its values have no meaning here"),
    ),
    "train.experimental.PythonState": Missing(
        "has no counterpart", "an object with `get_config`-like state as a `unisono.Variable`"
    ),
    "saved_model.save": own(
        "_saving.save_model", note="writes Keras models and modules, in Unisono's own format"
    ),
    "saved_model.load": own(
        "_saving.load_model", note="returns the model with `signatures`, or the module"
    ),
    "saved_model.SaveOptions": own("_keras.SaveOptions"),
    "saved_model.LoadOptions": own("_keras.SaveOptions"),
    **same("summary.", "unisono.summary.", "create_file_writer create_noop_writer record_if"),
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
    **same("summary.experimental.", "unisono.summary.", "get_step set_step"),
    **same(
        "io.gfile.", "_files.",
        "GFile copy glob listdir makedirs rename", own,
    ),
    **same("io.gfile.", "os.", "mkdir remove stat walk"),
    **same("io.gfile.", "os.path.", "exists isdir"),
    "io.gfile.rmtree": At("shutil.rmtree"),
    "gfile.GFile": own("_files.GFile"),
    **same(
        "io.", "_files.",
        "decode_image encode_jpeg encode_png read_file write_file", own_operator,
    ),
    **same("image.", "_files.", "decode_image encode_jpeg encode_png", own_operator),
    **dict.fromkeys(
        ("image.decode_jpeg", "image.decode_png", "io.decode_jpeg", "io.decode_png"),
        own_operator("_files.decode_image"),
    ),
    **same("", "_records.", _PARSED, own_operator),
    **same("io.", "_records.", _PARSED, own_operator),
    **same("", "_records.", _FEATURES, own),
    **same("io.", "_records.", _FEATURES, own),
    **same(
        "train.", "_records.",
        "BytesList Example Feature FeatureList FeatureLists Features FloatList Int64List SequenceExample",
        own,
    ),
    "io.TFRecordWriter": own("_records.TFRecordWriter"),
    "python_io.TFRecordWriter": own("_records.TFRecordWriter"),
    **dict.fromkeys(("io.VarLenFeature", "VarLenFeature", "io.SparseFeature", "io.RaggedFeature"), _VARIABLE),
    **dict.fromkeys(("io.serialize_tensor", "io.parse_tensor"), _TENSOR_BYTES),
    "io.parse_single_sequence_example": Missing(
        "has no counterpart", "`tf.train.SequenceExample.FromString(record)` in `Dataset.map`"
    ),
    "io.TFRecordOptions": Missing("belongs to compressed files", "uncompressed TFRecord files"),
    "io.decode_csv": own_operator("inputs._csv.decode_csv"),
    "audio.decode_wav": own_operator("inputs._audio.decode_wav"),
    "audio.encode_wav": Missing("has no counterpart", "Python's `wave`"),
    "io.match_filenames_once": Missing("belongs to graphs", "`tf.io.gfile.glob`"),
}  # fmt: skip

_CONFIG = "list_logical_devices list_physical_devices set_visible_devices"

DEVICES: dict[str, Entry] = {
    **same("config.", "_config.", _CONFIG, own),
    **same("config.experimental.", "_config.", _CONFIG, own),
    **same(
        "config.", "_config.",
        "LogicalDeviceConfiguration run_functions_eagerly set_logical_device_configuration", own,
    ),
    "config.get_visible_devices": own("_config.list_physical_devices"),
    "config.experimental.VirtualDeviceConfiguration": own("_config.LogicalDeviceConfiguration"),
    "config.experimental.set_memory_growth": own("_config.set_memory_growth"),
    "config.experimental.set_virtual_device_configuration": own("_config.set_logical_device_configuration"),
    **dict.fromkeys(
        (
            "config.experimental.enable_op_determinism", "config.optimizer.set_experimental_options",
            "config.optimizer.set_jit", "config.set_soft_device_placement",
            "config.threading.set_inter_op_parallelism_threads",
            "config.threading.set_intra_op_parallelism_threads", "debugging.set_log_device_placement",
        ),
        own("_tensors.no_op"),
    ),
    "config.experimental_connect_to_cluster": At("unisono.tpu.experimental_connect_to_cluster"),
    "test.is_gpu_available": own("_config.is_gpu_available"),
    **same(
        "tpu.experimental.", "unisono.tpu.experimental.", "initialize_tpu_system shutdown_tpu_system"
    ),
    "config.optimizer.get_experimental_options": Missing(
        "belongs to graphs", "`jax.jit(f).lower(*args).compile()`, which XLA optimizes"
    ),
    **dict.fromkeys(
        ("debugging.check_numerics", "debugging.enable_check_numerics"),
        Missing("has no counterpart", '`jax.config.update("jax_debug_nans", True)`'),
    ),
    "debugging.assert_equal": own("_operations.assert_equal"),
    "get_logger": own("_config.get_logger"),
    "sysconfig.get_build_info": Missing("belongs to TensorFlow's build", "`jax.print_environment_info()`"),
}  # fmt: skip

_OF_JAX = "the numbers are JAX's"

RANDOM: dict[str, Entry] = {
    "random.set_seed": own("_random.set_seed"),
    **same("random.", "_random.", "categorical normal truncated_normal uniform", own_operator),
    "random.shuffle": Operator("keras.random.shuffle", {"value": "x"}),
    **dict.fromkeys(
        ("random.Generator", "random.experimental.Generator"),
        own("numbers._stateless.RandomGenerator", _OF_JAX),
    ),
    **dict.fromkeys(
        ("random.split", "random.experimental.stateless_split"),
        own_operator("numbers._stateless.split", note=_OF_JAX),
    ),
    **same(
        "random.", "numbers._stateless.", "get_global_generator set_global_generator",
        lambda path: own(path, _OF_JAX),
    ),
    **same(
        "random.stateless_", "numbers._stateless.", "normal truncated_normal uniform",
        lambda path: own_operator(path, note=_OF_JAX),
    ),
    **{
        name: At(f"keras.initializers.{kind}")
        for name, kind in {
            "constant_initializer": "Constant", "ones_initializer": "Ones",
            "random_normal_initializer": "RandomNormal", "random_uniform_initializer": "RandomUniform",
            "truncated_normal_initializer": "TruncatedNormal", "zeros_initializer": "Zeros",
        }.items()
    },
    "initializers.GlorotUniform": At("keras.initializers.GlorotUniform"),
    **dict.fromkeys(
        ("image.resize", "image.resize_images"),
        own_operator("_images.resize", note='"bicubic" has another kernel in Keras'),
    ),
    **same(
        "image.", "_images.",
        "adjust_brightness adjust_contrast adjust_gamma adjust_hue adjust_saturation central_crop "
        "convert_image_dtype crop_to_bounding_box extract_patches hsv_to_rgb pad_to_bounding_box "
        "per_image_standardization random_brightness random_contrast random_crop random_flip_left_right "
        "random_flip_up_down random_hue random_saturation resize_with_crop_or_pad resize_with_pad rgb_to_hsv "
        "total_variation", own_operator,
    ),
    **same(
        "image.stateless_", "numbers._stateless.",
        "random_brightness random_contrast random_crop random_flip_left_right random_flip_up_down "
        "random_hue random_saturation", lambda path: own_operator(path, note=_OF_JAX),
    ),
    "image.flip_left_right": Operator("keras.ops.flip", {"image": "x"}, defaults={"axis": -2}),
    "image.flip_up_down": Operator("keras.ops.flip", {"image": "x"}, defaults={"axis": -3}),
    "image.grayscale_to_rgb": Operator(
        "keras.ops.repeat", {"images": "x"}, defaults={"repeats": 3, "axis": -1}
    ),
    "image.rgb_to_grayscale": Operator("keras.ops.image.rgb_to_grayscale"),
    "image.rot90": Operator(
        "jax.numpy.rot90", {"image": "m"}, order=("m", "k"), defaults={"axes": (-3, -2)}
    ),
    "image.transpose": Operator(
        "keras.ops.swapaxes", {"image": "x"}, defaults={"axis1": -3, "axis2": -2}
    ),
    "image.resize_image_with_crop_or_pad": own_operator("_images.resize_with_crop_or_pad"),
    "image.ResizeMethod": own("_images.ResizeMethod"),
    "image.sobel_edges": Missing("has no counterpart", "`keras.ops.depthwise_conv` with Sobel's kernels"),
    "image.sample_distorted_bounding_box": Missing(
        "has no counterpart", "`tf.keras.layers.RandomCrop`, or `tf.image.random_crop`"
    ),
}  # fmt: skip

_LAYERS = "HashedCrossing Hashing IntegerLookup StringLookup TextVectorization"


KERAS: dict[str, Entry] = {
    **same("keras.layers.", "unisono.preprocessing.", _LAYERS),
    **same("keras.layers.experimental.preprocessing.", "unisono.preprocessing.", _LAYERS),
    **same("keras.layers.experimental.preprocessing.", "keras.layers.", "Normalization Rescaling"),
    **dict.fromkeys(("keras.Input", "keras.layers.Input"), own("_keras.input_of")),
    **dict.fromkeys(
        ("keras.models.load_model", "keras.saving.load_model"), own("models._loading.load_model")
    ),
    **{
        f"keras.utils.{name}": Missing("belongs to graphs", "layers of `tf.keras`")
        for name in ("DeterministicRandomTestTool", "get_or_create_layer", "track_tf1_style_variables")
    },
    **{
        f"keras.experimental.{name}": Missing("is gone in Keras 3", "layers of `tf.keras` and `keras.Model`")
        for name in ("LinearModel", "WideDeepModel")
    },
    **same("keras.backend.", "_keras.", "get_value set_value", own),
    **same(
        "keras.experimental.", "unisono.experimental.", "export_saved_model load_from_saved_model"
    ),
    **same("keras.callbacks.", "unisono.callbacks.", "BackupAndRestore TensorBoard"),
    "keras.callbacks.experimental.BackupAndRestore": At("unisono.callbacks.BackupAndRestore"),
    "keras.callbacks.ModelCheckpoint": own("_keras.ModelCheckpoint"),
    "keras.losses.Reduction": own("_keras.KerasReduction"),
    **dict.fromkeys(
        ("keras.preprocessing.image_dataset_from_directory", "keras.utils.image_dataset_from_directory"),
        own("_directories.image_dataset_from_directory"),
    ),
    "keras.utils.get_file": own(
        "_directories.get_file", note="an archive's files lie next to it, and in Keras 3's directory"
    ),
    **dict.fromkeys(
        ("keras.experimental.SidecarEvaluator", "keras.utils.SidecarEvaluator"),
        At("unisono.SidecarEvaluator"),
    ),
    "keras.utils.experimental.DatasetCreator": At("unisono.data.DatasetCreator"),
    "keras.layers.experimental.SyncBatchNormalization": own("_keras.SyncBatchNormalization"),
    **dict.fromkeys(
        ("keras.mixed_precision.Policy", "keras.mixed_precision.experimental.Policy"),
        At("keras.dtype_policies.DTypePolicy"),
    ),
    "keras.mixed_precision.set_global_policy": At("keras.config.set_dtype_policy"),
    "keras.mixed_precision.global_policy": At("keras.config.dtype_policy"),
    "keras.mixed_precision.LossScaleOptimizer": At("keras.optimizers.LossScaleOptimizer"),
    "keras.mixed_precision.experimental.set_policy": At("keras.config.set_dtype_policy"),
    **same("keras.optimizers.legacy.", "keras.optimizers.", "Adagrad Adam RMSprop SGD"),
    "optimizers.Adam": At("keras.optimizers.Adam"),
}  # fmt: skip

PROGRAMS: dict[str, Entry] = {**DATA, **SAVING, **DEVICES, **RANDOM, **KERAS}
