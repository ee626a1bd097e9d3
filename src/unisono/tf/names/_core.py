"""Names of TensorFlow's core: dtypes, tensors, operations.

Tests: tests/unit/tf/test_names.py.
"""

from __future__ import annotations

import jax.numpy as jnp

from unisono.tf._entries import ADAPTERS, At, Entry, Missing, Operator, Value, own

_STRINGS = Missing(
    "has no counterpart: arrays of JAX hold numbers and booleans",
    "numbers made of the strings in the dataset, by `map` with plain Python, before the batch",
)
_RAGGED = Missing(
    "has no counterpart: arrays of JAX are dense",
    "`Dataset.padded_batch` and a mask, or `keras.layers.Masking`",
)

DTYPES: dict[str, Entry] = {
    **{
        name: Value(jnp.dtype(name), f'"{name}"')
        for name in (
            "bfloat16", "complex64", "float16", "float32", "float64", "int8", "int16", "int32", "int64",
            "uint8", "uint16", "uint32", "uint64",
        )
    },
    "bool": Value(jnp.dtype("bool"), '"bool"'),
    "half": Value(jnp.dtype("float16"), '"float16"'),
    "double": Value(jnp.dtype("float64"), '"float64"'),
    "string": Value("string", '"string"', "for data on the host: arrays of JAX hold numbers and booleans"),
    "dtypes.DType": At("numpy.dtype"),
    "DType": At("numpy.dtype"),
    "as_dtype": At("jax.numpy.dtype"),
    "dtypes.as_dtype": At("jax.numpy.dtype"),
}  # fmt: skip
DTYPES |= {f"dtypes.{name}": entry for name, entry in DTYPES.items() if "." not in name and "_" not in name}

TENSORS: dict[str, Entry] = {
    "Tensor": At("jax.Array"),
    "TensorSpec": At("unisono.data.TensorSpec"),
    "TensorShape": own("_tensors.shape_of"),
    "Variable": At("unisono.Variable"),
    "VariableAggregation": At("unisono.VariableAggregation"),
    "VariableSynchronization": At("unisono.VariableSynchronization"),
    "IndexedSlices": At("unisono.IndexedSlices"),
    "UnconnectedGradients": own("_tensors.UnconnectedGradients"),
    "GradientTape": At("unisono.GradientTape"),
    "Module": own("_tensors.Module"),
    "function": own("_tensors.function"),
    "RaggedTensor": _RAGGED,
    "ragged": _RAGGED,
    "SparseTensor": Missing(
        "has no counterpart here", "dense arrays, or `keras.layers.Embedding` of indices"
    ),
    "RaggedTensorSpec": _RAGGED,
    **{
        f"strings.{name}": Operator(
            f"{ADAPTERS}inputs._strings.{name}", {"input": "text", "pos": "start", "len": "size"}, tensors=0
        )
        for name in (
            "join",
            "length",
            "lower",
            "regex_full_match",
            "regex_replace",
            "split",
            "strip",
            "substr",
            "to_hash_bucket_fast",
            "to_number",
            "upper",
        )
    },
    **{
        f"strings.{name}": _STRINGS
        for name in (
            "as_string",
            "bytes_split",
            "format",
            "ngrams",
            "reduce_join",
            "to_hash_bucket",
            "to_hash_bucket_strong",
            "unicode_decode",
            "unicode_decode_with_offsets",
            "unicode_encode",
            "unicode_script",
            "unicode_split",
            "unicode_split_with_offsets",
            "unicode_transcode",
            "unsorted_segment_join",
        )
    },
    "sparse": Missing("has no counterpart here", "dense arrays, or `jax.experimental.sparse`"),
    "SparseTensorSpec": Missing("has no counterpart here", "`tf.TensorSpec` of dense arrays"),
    "lookup": Missing(
        "has no counterpart: strings are no tensors",
        "`tf.keras.layers.StringLookup`, or a dict of Python in `Dataset.map`",
    ),
    **{
        f"signal.{name}": own(f"numbers._signals.{name}")
        for name in ("frame", "hamming_window", "hann_window", "irfft", "irfft2d", "rfft", "rfft2d", "stft")
    },
    **{
        f"signal.{name}": Operator(f"jax.numpy.fft.{ours}", {"input": "a"})
        for name, ours in {"fft": "fft", "ifft": "ifft", "fft2d": "fft2", "ifft2d": "ifft2"}.items()
    },
    "lite": Missing("belongs to TensorFlow Lite", "`unisono.export.export_saved_model`, or `jax.export`"),
    **{
        f"experimental.{name}": Missing("has no counterpart", write)
        for name, write in {
            "BatchableExtensionType": "a dataclass, registered by `jax.tree_util.register_dataclass`",
            "ExtensionType": "a dataclass, registered by `jax.tree_util.register_dataclass`",
            "Optional": "None, or a tuple of a boolean and the value",
            "async_scope": "nothing: JAX computes asynchronously",
            "dispatch_for_api": "a function of your own, or a method of the class",
            "dispatch_for_binary_elementwise_apis": "a function of your own, or a method of the class",
            "dispatch_for_unary_elementwise_apis": "a function of your own, or a method of the class",
            "dtensor": "`jax.sharding`, or `unisono.MirroredStrategy`",
            "extension_type": "a dataclass, registered by `jax.tree_util.register_dataclass`",
            "tensorrt": "`jax.export`",
            "unregister_dispatch_for": "a function of your own, or a method of the class",
        }.items()
    },
    "experimental.numpy.experimental_enable_numpy_behavior": own(
        "_tensors.no_op", note="does nothing: arrays are JAX's, and so are the rules of their dtypes"
    ),
    "type_spec_from_value": Missing("has no counterpart", "`tf.TensorSpec(x.shape, x.dtype)`"),
    "variable_creator_scope": Missing("has no counterpart", "a function that makes the variables"),
    "constant": own("_tensors.constant"),
    "convert_to_tensor": own("_tensors.constant"),
    "executing_eagerly": own("_tensors.executing_eagerly"),
    "inside_function": own("_tensors.inside_function"),
    "is_tensor": At("keras.ops.is_tensor"),
    "control_dependencies": At("unisono.estimator._train_op.control_dependencies"),
    "name_scope": own("_tensors.name_scope"),
    "device": own("_tensors.device"),
    "no_op": own("_tensors.no_op"),
    "group": own("_tensors.group"),
    "print": own("_tensors.print_values"),
    "py_function": own("inputs._host.py_function", note="in `Dataset.map`, and outside of functions"),
    "numpy_function": own("inputs._host.numpy_function", note="in `Dataset.map`, and outside of functions"),
    "TensorArray": own(
        "inputs._host.TensorArray", note="with places that are known while a function is traced"
    ),
    "init_scope": Missing("belongs to graphs", "what is to happen once before the function"),
    "types": Missing("has no counterpart", "JAX's rules: a function is traced once for each shape and dtype"),
    "newaxis": Value(None, "None"),
    "no_gradient": At("keras.ops.stop_gradient"),
    "stop_gradient": Operator("keras.ops.stop_gradient", {"input": "variable"}),
    "custom_gradient": own("_tensors.custom_gradient"),
    "__version__": Value("2.21.0+unisono", "the version of TensorFlow whose names these are"),
}

_X = {"input_tensor": "x", "input": "x", "tensor": "x", "features": "x", "logits": "x", "t": "x"}
_XY = {"x": "x1", "y": "x2"}
_AXIS = {**_X, "keep_dims": "keepdims", "reduction_indices": "axis"}


def _ops() -> dict[str, Entry]:
    reductions = {
        "reduce_mean": "mean", "reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min",
        "reduce_prod": "prod", "reduce_all": "all", "reduce_any": "any", "reduce_std": "std",
        "reduce_variance": "var", "reduce_logsumexp": "logsumexp",
    }  # fmt: skip
    ops: dict[str, Entry] = {name: Operator(f"keras.ops.{op}", _AXIS) for name, op in reductions.items()}
    for name in (
        "abs", "acos:arccos", "asin:arcsin", "atan:arctan", "ceil", "cos", "cosh", "erf", "exp", "expm1",
        "floor", "log", "log1p", "log_sigmoid", "logical_not", "negative", "reciprocal", "round", "rsqrt",
        "sigmoid", "sign", "sin", "sinh", "softplus", "sqrt", "square", "tan", "tanh",
        "is_finite:isfinite", "is_inf:isinf", "is_nan:isnan", "real", "imag", "conj",
    ):  # fmt: skip
        ours, _, op = name.partition(":")
        ops[ours] = Operator(f"keras.ops.{op or ours}", _X)
    for name in (
        "add", "atan2:arctan2", "divide", "divide_no_nan", "equal", "floordiv:floor_divide", "floormod:mod",
        "greater", "greater_equal", "less", "less_equal", "logical_and", "logical_or", "logical_xor",
        "maximum", "minimum", "mod", "multiply", "not_equal", "pow:power", "subtract", "truediv:true_divide",
    ):  # fmt: skip
        ours, _, op = name.partition(":")
        ops[ours] = Operator(f"keras.ops.{op or ours}", _XY, tensors=2)
    ops |= {
        "argmax": own("_operations.argmax"),
        "argmin": own("_operations.argmin"),
        "cumsum": Operator("keras.ops.cumsum", defaults={"axis": 0}, order=("x", "axis")),
        "cumprod": Operator("keras.ops.cumprod", defaults={"axis": 0}, order=("x", "axis")),
        "top_k": Operator("keras.ops.top_k", {"input": "x"}, order=("x", "k", "sorted")),
        "in_top_k": Operator("keras.ops.in_top_k"),
        "squared_difference": own("_operations.squared_difference"),
        "add_n": own("_operations.add_n"),
        "accumulate_n": own("_operations.add_n"),
        "bincount": own("_operations.bincount"),
        "confusion_matrix": own("_operations.confusion_matrix"),
        "l2_normalize": own("_operations.l2_normalize"),
        "unsorted_segment_sum": own("_operations.unsorted_segment_sum"),
        "unsorted_segment_mean": own("_operations.unsorted_segment_mean"),
        "unsorted_segment_max": own("_operations.unsorted_segment_max"),
    }
    return ops


MATH = _ops()

#: Those of `tf.math` that are at `tf`, too.
_AT_ROOT = [
    "abs", "acos", "add", "add_n", "argmax", "argmin", "asin", "atan", "atan2", "cos", "cosh", "cumsum",
    "divide", "equal", "exp", "floor", "greater", "greater_equal", "less", "less_equal", "logical_and",
    "logical_not", "logical_or", "math", "maximum", "minimum", "multiply", "negative", "not_equal",
    "pow", "reduce_all", "reduce_any", "reduce_logsumexp", "reduce_max", "reduce_mean", "reduce_min",
    "reduce_prod", "reduce_sum", "round", "sigmoid", "sign", "sin", "sinh", "sqrt", "square",
    "subtract", "tan", "tanh", "truediv",
]  # fmt: skip

# fmt: off
ARRAYS: dict[str, Entry] = {
    "cast": Operator("keras.ops.cast"),
    "saturate_cast": Operator("keras.ops.saturate_cast", {"value": "x"}),
    "reshape": Operator("keras.ops.reshape", {"tensor": "x", "shape": "newshape"}),
    "transpose": Operator("keras.ops.transpose", {"a": "x", "perm": "axes"}),
    "concat": own("_operations.concat"),
    "stack": own("_operations.stack"),
    "unstack": Operator("keras.ops.unstack", {"value": "x"}, order=("x", "num", "axis")),
    "split": own("_operations.split"),
    "expand_dims": Operator("keras.ops.expand_dims", {"input": "x"}),
    "squeeze": Operator("keras.ops.squeeze", {"input": "x"}),
    "tile": Operator("keras.ops.tile", {"input": "x", "multiples": "repeats"}),
    "repeat": Operator("keras.ops.repeat", {"input": "x"}),
    "pad": Operator("keras.ops.pad", {"tensor": "x", "paddings": "pad_width"}),
    "gather": own("_operations.gather"),
    "where": own("_operations.where"),
    "boolean_mask": own("_operations.boolean_mask"),
    "one_hot": own("_operations.one_hot"),
    "shape": own("_operations.shape"),
    "rank": own("_indexing.rank"),
    "size": own("_indexing.size"),
    "identity": own("_operations.identity"),
    "range": own("numbers._made.arange"),
    "linspace": Operator("keras.ops.linspace"),
    "zeros": own("numbers._made.zeros"),
    "ones": own("numbers._made.ones"),
    "fill": Operator("keras.ops.full", {"dims": "shape", "value": "fill_value"}),
    "eye": own("numbers._made.eye"),
    "zeros_like": own("_operations.zeros_like"),
    "ones_like": own("_operations.ones_like"),
    "broadcast_to": Operator("keras.ops.broadcast_to", {"input": "x"}),
    "reverse": Operator("keras.ops.flip", {"tensor": "x"}),
    "roll": Operator("keras.ops.roll", {"input": "x"}),
    "sort": Operator("keras.ops.sort", {"values": "x"}),
    "argsort": Operator("keras.ops.argsort", {"values": "x"}),
    "searchsorted": Operator("keras.ops.searchsorted"),
    "slice": Operator("keras.ops.slice", {"input_": "inputs", "begin": "start_indices", "size": "shape"}),
    "clip_by_value": Operator(
        "keras.ops.clip", {"t": "x", "clip_value_min": "x_min", "clip_value_max": "x_max"}
    ),
    "clip_by_norm": own("_operations.clip_by_norm"),
    "clip_by_global_norm": own("_operations.clip_by_global_norm"),
    "norm": Operator("keras.ops.norm", {"tensor": "x"}),
    "einsum": Operator("keras.ops.einsum"),
    "tensordot": Operator("keras.ops.tensordot", {"a": "x1", "b": "x2"}),
    "matmul": own("_operations.matmul"),
    "meshgrid": own("_operations.meshgrid"),
    "cond": own("_operations.cond"),
    "while_loop": own("_operations.while_loop"),
    "map_fn": own("_operations.map_fn"),
    "vectorized_map": own("_operations.map_fn"),
    "unique": Missing(
        "makes an array whose size depends on the data", "`numpy.unique` outside of a function"
    ),
    "unique_with_counts": Missing(
        "makes an array whose size depends on the data", "`numpy.unique` outside of a function"
    ),
    "linalg.matmul": own("_operations.matmul"),
    "linalg.norm": Operator("keras.ops.norm", {"tensor": "x"}),
    "linalg.inv": Operator("keras.ops.inv", {"input": "x"}),
    "linalg.det": Operator("keras.ops.det", {"input": "x"}),
    "linalg.trace": Operator("keras.ops.trace"),
    "linalg.diag": own("_operations.diag"),
    "linalg.cholesky": Operator("keras.ops.cholesky", {"input": "x"}),
    "linalg.diag_part": own("_indexing.diag_part"),
    "linalg.eigh": Operator("keras.ops.eigh", {"tensor": "x"}),
    "linalg.einsum": Operator("keras.ops.einsum"),
    "linalg.matvec": own("_indexing.matvec"),
    "linalg.qr": Operator("keras.ops.qr", {"input": "x"}),
    "linalg.solve": Operator("keras.ops.solve", {"matrix": "a", "rhs": "b"}, tensors=2),
    "linalg.svd": own("_indexing.svd"),
    "svd": own("_indexing.svd"),
    **{
        name: own(f"_indexing.{name}")
        for name in (
            "gather_nd", "scatter_nd", "tensor_scatter_nd_add", "tensor_scatter_nd_max",
            "tensor_scatter_nd_min", "tensor_scatter_nd_sub", "tensor_scatter_nd_update",
        )
    },
    "complex": At("jax.lax.complex"),
    "dtypes.complex": At("jax.lax.complex"),
    "linalg.global_norm": own("_operations.global_norm"),
    "bitwise.bitwise_and": Operator("keras.ops.bitwise_and", _XY),
    "bitwise.bitwise_or": Operator("keras.ops.bitwise_or", _XY),
    "bitwise.bitwise_xor": Operator("keras.ops.bitwise_xor", _XY),
}
# fmt: on

NN: dict[str, Entry] = {
    f"nn.{name}": Operator(f"keras.ops.{op}", _X)
    for name, op in {
        "relu": "relu", "relu6": "relu6", "elu": "elu", "selu": "selu", "gelu": "gelu", "silu": "silu",
        "swish": "silu", "leaky_relu": "leaky_relu", "sigmoid": "sigmoid", "tanh": "tanh",
        "softmax": "softmax", "log_softmax": "log_softmax", "softplus": "softplus", "softsign": "softsign",
    }.items()
}  # fmt: skip
NN |= {
    "nn.gelu": Operator("keras.ops.gelu", _X, defaults={"approximate": False}, order=("x", "approximate")),
    "nn.compute_average_loss": At("unisono.nn.compute_average_loss"),
    "nn.scale_regularization_loss": At("unisono.nn.scale_regularization_loss"),
    "nn.embedding_lookup": At("unisono.nn.embedding_lookup"),
    "nn.moments": Operator("keras.ops.moments"),
    "nn.l2_loss": own("_operations.l2_loss"),
    "nn.l2_normalize": own("_operations.l2_normalize"),
    "nn.dropout": own("_operations.dropout"),
    "nn.bias_add": Operator("keras.ops.add", {"value": "x1", "bias": "x2"}),
    "nn.sparse_softmax_cross_entropy_with_logits": own("_operations.sparse_softmax_cross_entropy"),
    "nn.softmax_cross_entropy_with_logits": own("_operations.softmax_cross_entropy"),
    "nn.sigmoid_cross_entropy_with_logits": own("_operations.sigmoid_cross_entropy"),
    "nn.max_pool2d": own("_operations.max_pool"),
    "nn.max_pool": own("_operations.max_pool"),
    "nn.avg_pool2d": own("_operations.avg_pool"),
    "nn.conv2d": own("_operations.conv2d"),
    "nn.top_k": Operator("keras.ops.top_k", {"input": "x"}, order=("x", "k", "sorted")),
    "nn.in_top_k": Operator("keras.ops.in_top_k"),
    "nn.xw_plus_b": Missing("is gone", "`tf.matmul(x, weights) + biases`"),
    **{
        f"nn.{name}": Missing("has no counterpart", "`unisono.nn.embedding_lookup` of dense ids, and a sum")
        for name in ("embedding_lookup_sparse", "safe_embedding_lookup_sparse")
    },
    "nn.nce_loss": Missing("has no counterpart", "the cross entropy of all classes"),
    "nn.sampled_softmax_loss": Missing("has no counterpart", "the cross entropy of all classes"),
    "nn.convolution": Missing("has no counterpart", "`keras.ops.conv`"),
    "nn.conv1d": Missing("has no counterpart", "`keras.ops.conv`"),
    "nn.conv3d": Missing("has no counterpart", "`keras.ops.conv`"),
    "nn.conv2d_transpose": Missing("has no counterpart", "`keras.ops.conv_transpose`"),
    "nn.depthwise_conv2d": Missing("has no counterpart", "`keras.ops.depthwise_conv`"),
    "nn.batch_normalization": Operator(
        "keras.ops.batch_normalization",
        order=(
            "x",
            "mean",
            "variance",
            "offset",
            "scale",
            "epsilon",
        ),
        names={"variance_epsilon": "epsilon"},
        defaults={"axis": -1},
    ),
}

CORE: dict[str, Entry] = {
    **DTYPES,
    **TENSORS,
    **ARRAYS,
    **NN,
    **{f"math.{name}": entry for name, entry in MATH.items()},
    **{name: MATH[name] for name in _AT_ROOT if name in MATH},
    "math.l2_normalize": own("_operations.l2_normalize"),
    "math.softmax": Operator("keras.ops.softmax", _X),
    "math.top_k": Operator("keras.ops.top_k", {"input": "x"}, order=("x", "k", "sorted")),
}
