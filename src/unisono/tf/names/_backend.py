"""Names of `tf.keras.backend`, which Keras 3 has in `keras.ops`.

Tests: tests/unit/tf/test_names.py.
"""

from __future__ import annotations

from unisono.tf._entries import At, Entry, Missing, Operator, own, own_operator, same

_OTHERS = {"flatten": "ravel", "int_shape": "shape", "permute_dimensions": "transpose", "pow": "power"}

_ENTRIES: dict[str, Entry] = {
    **same(
        "", "keras.ops.",
        "abs all any arange argmax argmin cast clip cos cumprod cumsum elu equal exp expand_dims eye "
        "greater greater_equal hard_sigmoid less less_equal log logsumexp max maximum mean min minimum "
        "ndim not_equal one_hot ones ones_like prod relu repeat reshape round shape sigmoid sign sin "
        "softmax softplus softsign sqrt square squeeze std stop_gradient sum tanh tile transpose var "
        "zeros zeros_like dot binary_crossentropy categorical_crossentropy "
        "sparse_categorical_crossentropy",
        lambda path: Operator(path, {"keep_dims": "keepdims"}),
    ),
    **{name: Operator(f"keras.ops.{op}", {"pattern": "axes", "a": "x2"}) for name, op in _OTHERS.items()},
    "argmax": Operator("keras.ops.argmax", defaults={"axis": -1}, order=("x", "axis")),
    "argmin": Operator("keras.ops.argmin", defaults={"axis": -1}, order=("x", "axis")),
    "clip": Operator("keras.ops.clip", {"min_value": "x_min", "max_value": "x_max"}),
    "concatenate": Operator("keras.ops.concatenate", defaults={"axis": -1}, order=("xs", "axis"), tensors=0),
    "constant": own_operator("_tensors.constant"),
    "one_hot": Operator("keras.ops.one_hot", {"indices": "x"}),
    **same("", "_operations.", "dropout l2_normalize map_fn stack", own_operator),
    **same("random_", "_random.", "normal uniform", own_operator),
    "truncated_normal": own_operator("_random.truncated_normal"),
    "gather": Operator("keras.ops.take", {"reference": "x"}, defaults={"axis": 0}, order=("x", "indices")),
    "eval": own("_keras.get_value"),
    "update": own("_keras.set_value"),
    "variable": At("unisono.Variable"),
    "reverse": Operator("keras.ops.flip", {"axes": "axis"}),
    "batch_dot": Missing("is gone in Keras 3", "`keras.ops.einsum`, or `tf.keras.layers.Dot`"),
    "batch_flatten": Missing("is gone in Keras 3", "`tf.keras.layers.Flatten()`"),
    "gradients": Missing("belongs to graphs", "`tf.GradientTape`"),
    "function": Missing("belongs to graphs", "`tf.keras.Model(inputs, outputs)`, or `tf.function`"),
    "learning_phase": Missing("is gone in Keras 3", "the argument `training` of `call`"),
    "placeholder": Missing("belongs to graphs", "`tf.keras.Input`"),
    "rnn": Missing("is gone in Keras 3", "`tf.keras.layers.RNN`, or `jax.lax.scan`"),
    "switch": Missing("is gone in Keras 3", "`tf.where`, or `tf.cond`"),
    "get_session": Missing("belongs to graphs and sessions", "nothing: arrays hold their numbers"),
    "set_session": Missing("belongs to graphs and sessions", "nothing: JAX has no sessions"),
}  # fmt: skip

BACKEND: dict[str, Entry] = {f"keras.backend.{name}": entry for name, entry in _ENTRIES.items()}
