"""Names of TensorFlow's core: dtypes, tensors, operations.

Tests: tests/unit/tf/test_names.py.
"""

from __future__ import annotations

import jax.numpy as jnp

from unisono.tf._entries import At, Entry, Missing, Operator, Value, own, own_operator, same

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
    **same("", "unisono.", "GradientTape IndexedSlices Variable VariableAggregation VariableSynchronization"),
    "UnconnectedGradients": own("_tensors.UnconnectedGradients"),
    "Module": At("unisono._saved._module.Module"),
    "function": own("_tensors.function"),
    "RaggedTensor": _RAGGED,
    "ragged": _RAGGED,
    "SparseTensor": Missing(
        "has no counterpart here", "dense arrays, or `keras.layers.Embedding` of indices"
    ),
    "RaggedTensorSpec": _RAGGED,
    **same(
        "strings.",
        "inputs._strings.",
        "join length lower regex_full_match regex_replace split strip substr to_hash_bucket_fast "
        "to_number upper",
        lambda path: own_operator(path, names={"input": "text", "pos": "start", "len": "size"}),
    ),
    **{
        f"strings.{name}": _STRINGS
        for name in (
            "as_string", "bytes_split", "format", "ngrams", "reduce_join", "to_hash_bucket",
            "to_hash_bucket_strong", "unicode_decode", "unicode_decode_with_offsets", "unicode_encode",
            "unicode_script", "unicode_split", "unicode_split_with_offsets", "unicode_transcode",
            "unsorted_segment_join",
        )
    },
    "sparse": Missing("has no counterpart here", "dense arrays, or `jax.experimental.sparse`"),
    "SparseTensorSpec": Missing("has no counterpart here", "`tf.TensorSpec` of dense arrays"),
    "lookup": Missing(
        "has no counterpart: strings are no tensors",
        "`tf.keras.layers.StringLookup`, or a dict of Python in `Dataset.map`",
    ),
    **same(
        "signal.",
        "numbers._signals.",
        "frame hamming_window hann_window irfft irfft2d rfft rfft2d stft",
        own_operator,
    ),
    **{
        f"signal.{name}": Operator(f"jax.numpy.fft.{ours}", {"input": "a"})
        for name, ours in {"fft": "fft", "ifft": "ifft", "fft2d": "fft2", "ifft2d": "ifft2"}.items()
    },
    "lite": Missing("belongs to TensorFlow Lite", "`unisono.export.export_saved_model`, or `jax.export`"),
    **dict.fromkeys(
        (
            "experimental.BatchableExtensionType", "experimental.ExtensionType",
            "experimental.extension_type",
        ),
        Missing("has no counterpart", "a dataclass, registered by `jax.tree_util.register_dataclass`"),
    ),
    **dict.fromkeys(
        (
            "experimental.dispatch_for_api", "experimental.dispatch_for_binary_elementwise_apis",
            "experimental.dispatch_for_unary_elementwise_apis", "experimental.unregister_dispatch_for",
        ),
        Missing("has no counterpart", "a function of your own, or a method of the class"),
    ),
    "experimental.Optional": Missing("has no counterpart", "None, or a tuple of a boolean and the value"),
    "experimental.async_scope": Missing("has no counterpart", "nothing: JAX computes asynchronously"),
    "experimental.dtensor": Missing(
        "has no counterpart", "`jax.sharding`, or `unisono.MirroredStrategy`"
    ),
    "experimental.tensorrt": Missing("has no counterpart", "`jax.export`"),
    "experimental.numpy.experimental_enable_numpy_behavior": own(
        "_tensors.no_op", note="does nothing: arrays are JAX's, and so are the rules of their dtypes"
    ),
    "type_spec_from_value": Missing("has no counterpart", "`tf.TensorSpec(x.shape, x.dtype)`"),
    "variable_creator_scope": Missing("has no counterpart", "a function that makes the variables"),
    "constant": own_operator("_tensors.constant"),
    "convert_to_tensor": own_operator("_tensors.constant"),
    **same("", "_tensors.", "device executing_eagerly inside_function", own),
    "is_tensor": At("keras.ops.is_tensor"),
    "control_dependencies": At("unisono.estimator.session._graph.control_dependencies"),
    "print": own("_tensors.print_values"),
    **same(
        "", "inputs._host.", "numpy_function py_function",
        lambda path: own_operator(path, note="in `Dataset.map`, and outside of functions"),
    ),
    "TensorArray": own(
        "inputs._host.TensorArray", note="with places that are known while a function is traced"
    ),
    "init_scope": Missing("belongs to graphs", "what is to happen once before the function"),
    "types": Missing("has no counterpart", "JAX's rules: a function is traced once for each shape and dtype"),
    "newaxis": Value(None, "None"),
    "no_gradient": At("keras.ops.stop_gradient"),
    "stop_gradient": Operator("keras.ops.stop_gradient", {"input": "variable"}),
    "name_scope": At("jax.named_scope"),
    "custom_gradient": own("_tensors.custom_gradient"),
    "__version__": Value("2.21.0+unisono", "the version of TensorFlow whose names these are"),
}  # fmt: skip

_X = {"input_tensor": "x", "input": "x", "tensor": "x", "features": "x", "logits": "x", "t": "x"}
_XY = {"x": "x1", "y": "x2"}
_TOP_K = Operator("keras.ops.top_k", {"input": "x"}, order=("x", "k", "sorted"))
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
        "top_k": _TOP_K,
        "in_top_k": Operator("keras.ops.in_top_k"),
        "accumulate_n": own_operator("_operations.add_n"),
        "unsorted_segment_sum": Operator("jax.ops.segment_sum", tensors=2),
        "unsorted_segment_max": Operator("jax.ops.segment_max", tensors=2),
        **same(
            "",
            "_operations.",
            "add_n argmax argmin bincount confusion_matrix cumprod cumsum l2_normalize squared_difference "
            "unsorted_segment_mean",
            own_operator,
        ),
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
    **same(
        "",
        "_operations.",
        "boolean_mask clip_by_global_norm clip_by_norm concat gather map_fn matmul meshgrid one_hot "
        "shape split stack where while_loop",
        own_operator,
    ),
    "cond": Operator("unisono.step.functions._conditional.cond", tensors=0),
    "zeros_like": Operator("keras.ops.zeros_like", {"input": "x"}),
    "ones_like": Operator("keras.ops.ones_like", {"input": "x"}),
    "cast": Operator("keras.ops.cast"),
    "saturate_cast": Operator("keras.ops.saturate_cast", {"value": "x"}),
    "reshape": Operator("keras.ops.reshape", {"tensor": "x", "shape": "newshape"}),
    "transpose": Operator("keras.ops.transpose", {"a": "x", "perm": "axes"}),
    "unstack": Operator("keras.ops.unstack", {"value": "x"}, order=("x", "num", "axis")),
    "expand_dims": Operator("keras.ops.expand_dims", {"input": "x"}),
    "squeeze": Operator("keras.ops.squeeze", {"input": "x"}),
    "tile": Operator("keras.ops.tile", {"input": "x", "multiples": "repeats"}),
    "repeat": Operator("keras.ops.repeat", {"input": "x"}),
    "pad": Operator("keras.ops.pad", {"tensor": "x", "paddings": "pad_width"}),
    "range": own_operator("numbers._made.arange"),
    "linspace": Operator("keras.ops.linspace"),
    "zeros": own_operator("numbers._made.zeros"),
    "ones": own_operator("numbers._made.ones"),
    "fill": Operator("keras.ops.full", {"dims": "shape", "value": "fill_value"}),
    "eye": own_operator("numbers._made.eye"),
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
    "norm": Operator("keras.ops.norm", {"tensor": "x"}),
    "einsum": Operator("keras.ops.einsum"),
    "tensordot": Operator("keras.ops.tensordot", {"a": "x1", "b": "x2"}),
    "vectorized_map": own_operator("_operations.map_fn"),
    **dict.fromkeys(
        ("unique", "unique_with_counts"),
        Missing("makes an array whose size depends on the data", "`numpy.unique` outside of a function"),
    ),
    "linalg.matmul": own_operator("_operations.matmul"),
    "linalg.norm": Operator("keras.ops.norm", {"tensor": "x"}),
    "linalg.inv": Operator("keras.ops.inv", {"input": "x"}),
    "linalg.det": Operator("keras.ops.det", {"input": "x"}),
    "linalg.trace": Operator("keras.ops.trace"),
    "linalg.diag": own_operator("_operations.diag"),
    "linalg.cholesky": Operator("keras.ops.cholesky", {"input": "x"}),
    "linalg.diag_part": Operator(
        "keras.ops.diagonal", {"input": "x"}, ("x",), {"axis1": -2, "axis2": -1}
    ),
    "linalg.eigh": Operator("keras.ops.eigh", {"tensor": "x"}),
    "linalg.einsum": Operator("keras.ops.einsum"),
    "linalg.matvec": own_operator("_indexing.matvec"),
    "linalg.qr": Operator("keras.ops.qr", {"input": "x"}),
    "linalg.solve": Operator("keras.ops.solve", {"matrix": "a", "rhs": "b"}, tensors=2),
    "linalg.svd": own_operator("_indexing.svd"),
    **same(
        "",
        "_indexing.",
        "gather_nd rank scatter_nd size svd tensor_scatter_nd_add tensor_scatter_nd_max "
        "tensor_scatter_nd_min tensor_scatter_nd_sub tensor_scatter_nd_update",
        own_operator,
    ),
    "complex": At("jax.lax.complex"),
    "dtypes.complex": At("jax.lax.complex"),
    "linalg.global_norm": own_operator("_operations.global_norm"),
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
    **same("nn.", "unisono.nn.", "compute_average_loss embedding_lookup scale_regularization_loss"),
    "nn.moments": Operator("keras.ops.moments"),
    **same("nn.", "_operations.", "avg_pool conv2d dropout l2_loss l2_normalize max_pool", own_operator),
    "nn.bias_add": Operator("keras.ops.add", {"value": "x1", "bias": "x2"}),
    "nn.sparse_softmax_cross_entropy_with_logits": Operator(
        "keras.ops.sparse_categorical_crossentropy",
        {"labels": "target", "logits": "output"},
        defaults={"from_logits": True},
        tensors=2,
    ),
    "nn.softmax_cross_entropy_with_logits": own_operator("_operations.softmax_cross_entropy"),
    "nn.sigmoid_cross_entropy_with_logits": own_operator("_operations.sigmoid_cross_entropy"),
    "nn.max_pool2d": own_operator("_operations.max_pool"),
    "nn.avg_pool2d": own_operator("_operations.avg_pool"),
    "nn.top_k": _TOP_K,
    "nn.in_top_k": Operator("keras.ops.in_top_k"),
    "nn.xw_plus_b": Missing("is gone", "`tf.matmul(x, weights) + biases`"),
    **dict.fromkeys(
        ("nn.embedding_lookup_sparse", "nn.safe_embedding_lookup_sparse"),
        Missing("has no counterpart", "`unisono.nn.embedding_lookup` of dense ids, and a sum"),
    ),
    **dict.fromkeys(
        ("nn.nce_loss", "nn.sampled_softmax_loss"),
        Missing("has no counterpart", "the cross entropy of all classes"),
    ),
    **dict.fromkeys(
        ("nn.convolution", "nn.conv1d", "nn.conv3d"), Missing("has no counterpart", "`keras.ops.conv`")
    ),
    "nn.conv2d_transpose": Missing("has no counterpart", "`keras.ops.conv_transpose`"),
    "nn.depthwise_conv2d": Missing("has no counterpart", "`keras.ops.depthwise_conv`"),
    "nn.batch_normalization": Operator(
        "keras.ops.batch_normalization",
        order=("x", "mean", "variance", "offset", "scale", "epsilon"),
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
    "math.softmax": Operator("keras.ops.softmax", _X),
}
