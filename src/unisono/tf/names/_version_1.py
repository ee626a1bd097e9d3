"""Names of TensorFlow 1: what has another name today, and what belonged to graphs and sessions.

Tests: tests/unit/tf/test_names.py.
"""

from __future__ import annotations

from unisono.tf._entries import At, Entry, Missing, Operator, Value, own

_FUNCTION = "a `tf.function` of arguments, called with arrays"
_GRAPH = Missing("belongs to graphs and sessions, which are not there", _FUNCTION)
_QUEUES = Missing("belongs to queues of graphs", "`tf.data.Dataset`")
_VARIABLES = Missing("belongs to graphs and sessions", "`tf.Variable`, or layers of `tf.keras`")
_SESSIONS = Missing(
    "belongs to graphs and sessions",
    "`tf.distribute.ParameterServerStrategy` or `MultiWorkerMirroredStrategy`, with `model.fit`",
)
_SUMMARIES = Missing("belongs to graphs", "`tf.summary.create_file_writer`, and `with writer.as_default():`")

_GRAPHS: dict[str, Entry] = {
    **dict.fromkeys(
        (
            "Graph", "GraphKeys", "InteractiveSession", "RunMetadata", "RunOptions", "Session",
            "add_to_collection", "get_collection", "get_default_graph", "get_default_session",
            "gradients", "hessians",
            "import_graph_def", "placeholder_with_default", "py_func", "reset_default_graph",
        ),
        _GRAPH,
    ),
    **dict.fromkeys(
        (
            "all_variables", "get_variable", "get_variable_scope", "global_variables", "local_variables",
            "trainable_variables", "variable_scope",
        ),
        _VARIABLES,
    ),
    **dict.fromkeys(
        (
            "FixedLengthRecordReader", "TFRecordReader", "TextLineReader", "WholeFileReader", "FIFOQueue",
            "RandomShuffleQueue", "data.Iterator", "train.Coordinator", "train.QueueRunner", "train.batch",
            "train.shuffle_batch", "train.start_queue_runners", "train.string_input_producer",
        ),
        _QUEUES,
    ),
    **dict.fromkeys(
        (
            "train.MonitoredSession", "train.MonitoredTrainingSession", "train.Supervisor",
            "train.SyncReplicasOptimizer", "train.replica_device_setter",
        ),
        _SESSIONS,
    ),
    **dict.fromkeys(("summary.FileWriter", "summary.merge", "summary.merge_all"), _SUMMARIES),
    "examples": Missing("is not part of the library", "`tf.keras.datasets`"),
    "contrib.slim": Missing("is gone", "layers and applications of `tf.keras`"),
    "contrib.layers": Missing("is gone", "layers and regularizers of `tf.keras`"),
    "contrib.learn": Missing("is gone", "`tf.estimator`, or `tf.keras`"),
    "contrib.tpu": Missing("is gone", "`tf.distribute.TPUStrategy`"),
    "contrib.resampler": At("jax.scipy.ndimage", "has `map_coordinates`"),
    "python": Missing("is private to TensorFlow", "the public name below `tf`"),
    "data.experimental.service": Missing(
        "is TensorFlow's service of data", "`AutoShardPolicy`: each worker reads its part of the data"
    ),
}  # fmt: skip

_GFILE = {
    "Copy": "copy", "DeleteRecursively": "rmtree", "Exists": "exists", "FastGFile": "GFile",
    "Glob": "glob", "IsDirectory": "isdir", "ListDirectory": "listdir", "MakeDirs": "makedirs",
    "MkDir": "mkdir", "Open": "GFile", "Remove": "remove", "Rename": "rename", "Stat": "stat", "Walk": "walk",
}  # fmt: skip

_LEVELS = {"DEBUG": 10, "INFO": 20, "WARN": 30, "ERROR": 40, "FATAL": 50}

VERSION_1: dict[str, Entry] = {
    **_GRAPHS,
    **{f"gfile.{old}": own(f"_files.{name}") for old, name in _GFILE.items()},
    **{f"logging.{level}": Value(number, str(number)) for level, number in _LEVELS.items()},
    **{
        f"logging.{name}": own(f"_programs.{name}")
        for name in ("debug", "error", "fatal", "info", "set_verbosity", "warn", "warning")
    },
    "app.run": own("_programs.run"),
    "app.flags": At("absl.flags"),
    "flags": At("absl.flags"),
    **{
        f"compat.{name}": own(f"_programs.{name}") for name in ("as_bytes", "as_str", "as_str_any", "as_text")
    },
    **dict.fromkeys(
        (
            "disable_eager_execution",
            "disable_v2_behavior",
            "enable_eager_execution",
            "enable_resource_variables",
            "enable_v2_behavior",
            "enable_v2_tensorshape",
        ),
        own("_tensors.no_op"),
    ),
    "nest.assert_same_structure": At("keras.tree.assert_same_structure"),
    "nest.flatten": At("keras.tree.flatten"),
    "nest.map_structure": At("keras.tree.map_structure"),
    "nest.pack_sequence_as": At("keras.tree.pack_sequence_as"),
    "random_normal": own("_random.normal"),
    "random_uniform": own("_random.uniform"),
    "truncated_normal": own("_random.truncated_normal"),
    "set_random_seed": At("keras.utils.set_random_seed"),
    "log": Operator("keras.ops.log"),
    "to_double": own("_tensors.to_double"),
    "to_float": Operator("keras.ops.cast", defaults={"dtype": "float32"}),
    "to_int32": Operator("keras.ops.cast", defaults={"dtype": "int32"}),
    "to_int64": own("_tensors.to_int64"),
    "nn.softmax_cross_entropy_with_logits_v2": own("_operations.softmax_cross_entropy"),
    "version.VERSION": Value("2.21.0+unisono", "the version of TensorFlow whose names these are"),
    "Dimension": own("_spellings.Dimension", "is a number with `value`"),
    "make_template": _VARIABLES,
    "wrap_function": _GRAPH,
    **dict.fromkeys(
        ("enable_tensor_equality", "disable_tensor_equality"),
        own("_tensors.no_op", "does nothing: arrays are compared by value"),
    ),
    **dict.fromkeys(
        (
            "saved_model.Builder",
            "saved_model.builder",
            "saved_model.simple_save",
            "saved_model.predict_signature_def",
            "saved_model.signature_def_utils",
        ),
        Missing("belongs to graphs and sessions", "`tf.saved_model.save` of a Keras model"),
    ),
    "__git_version__": Value("unisono", '"unisono"'),
    "version.GIT_VERSION": Value("unisono", '"unisono"'),
    "train.Server": At("unisono.Server"),
    "keras.backend.set_learning_phase": own(
        "_tensors.no_op", "does nothing: `fit` and `model(x, training=True)` say what is training"
    ),
    "keras.backend.clear_session": At("keras.utils.clear_session"),
}
