"""Rows of a batch: filled up where they do not divide, and gathered where they meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import ReplicaEngine

_L = keras.layers

#: Keras' own layers whose result for a row depends on this row alone, where no axis is the batch's.
#: Whatever is not listed may mix rows; a test compares each with one device on padded batches.
ROW_WISE = frozenset(
    {
        *(_L.InputLayer, _L.Identity, _L.Flatten, _L.Reshape, _L.Permute, _L.RepeatVector),
        *(_L.Dense, _L.EinsumDense, _L.Embedding, _L.Activation, _L.ReLU, _L.LeakyReLU, _L.PReLU, _L.ELU),
        *(_L.Softmax, _L.Rescaling, _L.Normalization, _L.SpectralNormalization),
        *(_L.Conv1D, _L.Conv2D, _L.Conv3D, _L.Conv1DTranspose, _L.Conv2DTranspose, _L.Conv3DTranspose),
        *(_L.DepthwiseConv1D, _L.DepthwiseConv2D, _L.SeparableConv1D, _L.SeparableConv2D),
        *(_L.MaxPooling1D, _L.MaxPooling2D, _L.MaxPooling3D),
        *(_L.AveragePooling1D, _L.AveragePooling2D, _L.AveragePooling3D),
        *(_L.GlobalMaxPooling1D, _L.GlobalMaxPooling2D, _L.GlobalMaxPooling3D),
        *(_L.GlobalAveragePooling1D, _L.GlobalAveragePooling2D, _L.GlobalAveragePooling3D),
        *(_L.ZeroPadding1D, _L.ZeroPadding2D, _L.ZeroPadding3D, _L.Resizing, _L.CenterCrop),
        *(_L.Cropping1D, _L.Cropping2D, _L.Cropping3D, _L.UpSampling1D, _L.UpSampling2D, _L.UpSampling3D),
        *(_L.LayerNormalization, _L.RMSNormalization, _L.GroupNormalization, _L.UnitNormalization),
        *(_L.Dropout, _L.SpatialDropout1D, _L.SpatialDropout2D, _L.SpatialDropout3D),
        *(_L.AlphaDropout, _L.GaussianDropout, _L.GaussianNoise),
        *(_L.SimpleRNN, _L.LSTM, _L.GRU, _L.ConvLSTM1D, _L.ConvLSTM2D, _L.ConvLSTM3D, _L.RNN),
        *(_L.SimpleRNNCell, _L.LSTMCell, _L.GRUCell, _L.StackedRNNCells, _L.Bidirectional),
        *(_L.TimeDistributed, _L.MultiHeadAttention, _L.GroupQueryAttention, _L.Attention),
        *(_L.AdditiveAttention, _L.Add, _L.Subtract, _L.Multiply, _L.Average, _L.Maximum, _L.Minimum),
        *(_L.Concatenate, _L.Dot, _L.ReversibleEmbedding),
    }
)

#: Layers that Keras makes inside of others.
_PARTS = ("ConvLSTMCell", "DropoutRNNCell")

#: Marks an `InputLayer` that Keras made from the first data.
_FROM_DATA = "_unisono_from_data"

#: Of these, those whose config holds the number of an axis that may be the batch's.
_AXES = ("axis", "axes", "_axis", "_attention_axes")


def pad_rows(array: Any, parts: int) -> Any:
    """Repeat the last row until the number of rows divides by `parts`.

    True rows, and not zeros, because a row of zeros may give NaN where a true one does not.

    >>> pad_rows(np.array([1, 2, 3]), 2)
    array([1, 2, 3, 3])
    """
    missing = -len(array) % parts
    if missing == 0:
        return array
    library = np if isinstance(array, np.ndarray) else jnp
    return library.concatenate([array, library.repeat(array[-1:], missing, axis=0)])


def depends_on_batch(model: Any) -> str | None:
    """Return why a model may not see padded rows, or None when every layer treats rows apart.

    Args:
        model: a built Keras model.
    """
    if not _is_keras_own(model):
        return f"the model is of the class {type(model).__name__}, whose code may mix rows"
    for layer in model._flatten_layers(include_self=False):
        reason = _layer_mixes_rows(layer)
        if reason:
            return reason
    nested = [layer for layer in model._flatten_layers() if isinstance(layer, keras.Model)]
    for part in nested:
        for operation in getattr(part, "operations", ()):
            if not isinstance(operation, keras.Layer):
                return f"the operation {operation.name!r} may mix rows"
    return None


def one_batch_size(model: Any) -> str | None:
    """Return why a model takes batches of one size only, or None when it takes any.

    Args:
        model: a built Keras model.
    """
    for layer in model._flatten_layers():
        name = f"the layer {layer.name!r} ({type(layer).__name__})"
        if getattr(layer, "stateful", False):
            return f"{name} keeps a state for each row"
        if isinstance(layer, keras.layers.InputLayer) and not getattr(layer, _FROM_DATA, False):
            rows = layer.batch_shape[0]
            if rows is not None:
                return f"{name} takes {rows} rows (write its shape without them if it takes any number)"
    return None


def sequential_built(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Build a `keras.Sequential`, and note whether its input's shape is only that of the first batch.

    Keras makes the input of a model without one from the first data, with their number of rows, and
    accepts any other number afterwards. A user who writes `Input(batch_shape=...)` asks for that number.
    """
    declared = any(isinstance(layer, keras.layers.InputLayer) for layer in self._layers[:1])
    result = original(self, *args, **kwargs)
    if not declared and self._layers and isinstance(self._layers[0], keras.layers.InputLayer):
        object.__setattr__(self._layers[0], _FROM_DATA, True)
    return result


def _is_keras_own(layer: Any) -> bool:
    """Whether a layer's code is Keras' and not a user's."""
    return type(layer).__module__.startswith("keras.")


def _layer_mixes_rows(layer: Any) -> str | None:
    if isinstance(layer, keras.Model) and _is_keras_own(layer):
        return None  # its own layers are asked one by one
    name = f"the layer {layer.name!r} ({type(layer).__name__})"
    if type(layer) not in ROW_WISE and not _is_part(layer):
        return f"{name} may mix rows"
    if _crosses_batch(layer):
        return f"{name} has the batch among its axes"
    if getattr(layer, "stateful", False):
        return f"{name} keeps a state for each row"
    if getattr(layer, "mask_zero", False):
        return f"the layer {layer.name!r} makes a mask"
    if layer.activity_regularizer is not None:
        return f"the layer {layer.name!r} has an activity regularizer"
    return None


def _is_part(layer: Any) -> bool:
    """Whether a layer is one that Keras makes inside of those that are listed, and does not name."""
    return _is_keras_own(layer) and type(layer).__name__ in _PARTS


def _crosses_batch(layer: Any) -> bool:
    for name in _AXES:
        axes = getattr(layer, name, None)
        numbers = axes if isinstance(axes, (list, tuple)) else [axes]
        if any(n is not None and (n == 0 or n < -1) for n in numbers):
            return True
    equation = getattr(layer, "equation", None)
    if isinstance(layer, keras.layers.EinsumDense) and equation is not None:
        inputs, result = equation.replace(" ", "").split("->")
        return bool(inputs[0] != result[0])
    return False


def gather_rows(tree: Any, engine: ReplicaEngine, means: bool = True) -> Any:
    """Return the rows of all replicas, in order, on every replica.

    Args:
        tree: pytree of arrays with this replica's rows; scalars and None pass.
        engine: this replica.
        means: whether gradients are averaged over replicas afterwards, as in `fit`. Then every
            replica must compute the same of the rows.
    """

    def gathered(x: Any) -> Any:
        if jnp.ndim(x) == 0:
            return x
        if x.dtype == jnp.bool_:
            return gathered(x.astype(jnp.int32)).astype(jnp.bool_)
        return _gathered(x, engine) if means else engine.all_gather(x, 0)

    return jax.tree.map(gathered, tree)


def first_rows(tree: Any, rows: int) -> Any:
    """Return the first rows of all arrays.

    Args:
        tree: pytree of arrays; scalars pass.
        rows: how many.
    """
    return jax.tree.map(lambda x: x[:rows] if jnp.ndim(x) else x, tree)


def own_rows(x: Any, rows: int, engine: ReplicaEngine) -> Any:
    """Return a replica's part of an array of all replicas' rows.

    Args:
        x: array of all rows, in the order of the replicas.
        rows: how many are this replica's.
        engine: this replica.
    """
    if not isinstance(engine.replica_id, int):
        return jax.lax.dynamic_slice_in_dim(x, engine.replica_id * rows, rows)
    sizes = [engine.total(rows * (engine.replica_id == i)) for i in range(engine.num_replicas)]
    start = sum(sizes[: engine.replica_id])
    return x[start : start + rows]


def _gathered(x: Any, engine: ReplicaEngine) -> Any:
    rows, replicas = x.shape[0], engine.num_replicas

    @jax.custom_vjp
    def gather(x: Any) -> Any:
        return engine.all_gather(x, 0)

    def forward(x: Any) -> tuple[Any, None]:
        return gather(x), None

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        # Every replica computes the same loss, so the cotangent is at hand: no communication. It is
        # multiplied because `fit` averages gradients.
        own = jax.lax.dynamic_slice_in_dim(cotangent, engine.replica_id * rows, rows)
        return (own * replicas,)

    gather.defvjp(forward, backward)
    return gather(x)


def rows_of(given: Any) -> int | None:
    """Return how many rows all arrays have; None where they do not agree, or have none.

    Args:
        given: pytree of arrays; scalars do not count.
    """
    sizes = {np.shape(x)[:1] for x in jax.tree.leaves(given) if np.ndim(x)}
    return sizes.pop()[0] if len(sizes) == 1 else None


class Aside(keras.StatelessScope):
    """Reads variables as the code around it does, and forgets what is written inside."""

    def get_current_value(self, variable: Any) -> Any:
        """Return the value written inside, or that of the scope around."""
        value = super().get_current_value(variable)
        if value is not None or self.original_scope is None:
            return value
        return self.original_scope.get_current_value(variable)
