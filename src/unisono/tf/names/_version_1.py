"""Names of TensorFlow 1: what has another name today, and what belonged to graphs and sessions.

Tests: tests/unit/tf/test_names.py.
"""

from __future__ import annotations

import numpy as np

from unisono.tf._entries import At, Entry, Missing, Operator, Value, device_dtype, own, own_operator, same

_GRAPHS: dict[str, Entry] = {
    **dict.fromkeys(
        (
            "Graph", "InteractiveSession", "RunMetadata", "RunOptions", "Session", "get_default_graph",
            "get_default_session", "hessians", "import_graph_def", "placeholder_with_default", "py_func",
            "reset_default_graph", "wrap_function",
        ),
        Missing(
            "belongs to graphs and sessions, which are not there",
            "a `tf.function` of arguments, called with arrays",
        ),
    ),
    **dict.fromkeys(
        ("all_variables", "local_variables", "make_template"),
        Missing("belongs to graphs and sessions", "`tf.Variable`, or layers of `tf.keras`"),
    ),
    **dict.fromkeys(
        (
            "FixedLengthRecordReader", "TFRecordReader", "TextLineReader", "WholeFileReader", "FIFOQueue",
            "RandomShuffleQueue", "data.Iterator", "train.Coordinator", "train.QueueRunner", "train.batch",
            "train.shuffle_batch", "train.start_queue_runners", "train.string_input_producer",
        ),
        Missing("belongs to queues of graphs", "`tf.data.Dataset`"),
    ),
    **dict.fromkeys(
        (
            "train.MonitoredSession", "train.MonitoredTrainingSession", "train.Supervisor",
            "train.replica_device_setter",
        ),
        Missing(
            "belongs to graphs and sessions",
            "`tf.distribute.ParameterServerStrategy` or `MultiWorkerMirroredStrategy`, with `model.fit`",
        ),
    ),
    "summary.FileWriter": Missing(
        "belongs to graphs", "`tf.summary.create_file_writer`, and `with writer.as_default():`"
    ),
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
    "Copy": "copy", "FastGFile": "GFile", "Glob": "glob", "ListDirectory": "listdir", "MakeDirs": "makedirs",
    "Open": "GFile", "Rename": "rename",
}  # fmt: skip
_OF_PYTHON = {
    "DeleteRecursively": "shutil.rmtree", "Exists": "os.path.exists", "IsDirectory": "os.path.isdir",
    "MkDir": "os.mkdir", "Remove": "os.remove", "Stat": "os.stat", "Walk": "os.walk",
}  # fmt: skip

_LEVELS = {"DEBUG": 10, "INFO": 20, "WARN": 30, "ERROR": 40, "FATAL": 50}

VERSION_1: dict[str, Entry] = {
    **_GRAPHS,
    **{f"gfile.{old}": own(f"_files.{name}") for old, name in _GFILE.items()},
    **{f"gfile.{old}": At(path) for old, path in _OF_PYTHON.items()},
    **{f"logging.{level}": Value(number, str(number)) for level, number in _LEVELS.items()},
    **same("logging.", "_programs.", "debug error fatal info set_verbosity warn warning", own),
    "app.run": own("_programs.run"),
    **dict.fromkeys(("app.flags", "flags"), At("absl.flags")),
    **same("compat.", "_programs.", "as_bytes as_str as_str_any as_text", own),
    **dict.fromkeys(
        (
            "disable_eager_execution", "disable_v2_behavior", "enable_eager_execution",
            "enable_resource_variables", "enable_v2_behavior", "enable_v2_tensorshape",
        ),
        own("_tensors.no_op"),
    ),
    **same("nest.", "keras.tree.", "assert_same_structure flatten map_structure pack_sequence_as"),
    **same("random_", "_random.", "normal uniform", own_operator),
    "truncated_normal": own_operator("_random.truncated_normal"),
    "set_random_seed": At("keras.utils.set_random_seed"),
    "log": Operator("keras.ops.log"),
    **{
        f"to_{name}": Operator("keras.ops.cast", defaults={"dtype": device_dtype(np.dtype(dtype))})
        for name, dtype in {
            "double": "float64", "float": "float32", "int32": "int32", "int64": "int64"
        }.items()
    },
    "nn.softmax_cross_entropy_with_logits_v2": own_operator("_operations.softmax_cross_entropy"),
    "version.VERSION": Value("2.21.0+unisono", "the version of TensorFlow whose names these are"),
    "Dimension": own("_spellings.Dimension", "is a number with `value`"),
    **dict.fromkeys(
        ("enable_tensor_equality", "disable_tensor_equality"),
        own("_tensors.no_op", "does nothing: arrays are compared by value"),
    ),
    **dict.fromkeys(
        (
            "saved_model.Builder", "saved_model.builder", "saved_model.predict_signature_def",
            "saved_model.signature_def_utils", "saved_model.simple_save",
        ),
        Missing("belongs to graphs and sessions", "`tf.saved_model.save` of a Keras model"),
    ),
    **dict.fromkeys(("__git_version__", "version.GIT_VERSION"), Value("unisono", '"unisono"')),
    "train.Server": At("unisono.Server"),
    "keras.backend.set_learning_phase": own(
        "_tensors.no_op", "does nothing: `fit` and `model(x, training=True)` say what is training"
    ),
    "keras.backend.clear_session": At("keras.utils.clear_session"),
}  # fmt: skip
