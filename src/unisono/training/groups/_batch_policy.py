"""How the rows of a batch reach the replicas: split, whole on each, or filled up and split.

A batch that divides is split over the replicas. The ragged last batch of an epoch runs whole on
every replica: exact for every layer, loss and metric. A batch size that never divides is padded
and split where every layer treats rows apart; then losses and metrics see the true rows of all
replicas, so that they too are exact.

Tests: tests/unit/training/test_row_wise_layers.py, tests/virtual/training/test_exact.py.
"""

from __future__ import annotations

import enum
import logging
import weakref
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._types import KerasWrap, PyTree
from unisono.data._batches import unbatched
from unisono.step._keras_internals import all_layers, layers_with_input, named_axes

_LOG = logging.getLogger("unisono")

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

#: Layers that Keras makes inside of those that are listed, and does not name.
_PARTS = ("ConvLSTMCell", "DropoutRNNCell")

#: What was said of each model: every function of a model has a policy, and `compile` makes new ones.
_SAID: weakref.WeakKeyDictionary[keras.Model, set[str]] = weakref.WeakKeyDictionary()

#: So many shapes of rows are not those of a few lengths on purpose.
_MANY_SHAPES = 16

#: Marks an `InputLayer` that Keras made from the first data.
_FROM_DATA = "_unisono_from_data"


Array = TypeVar("Array", np.ndarray, jax.Array)


class Mode(enum.Enum):
    """How a batch reaches the replicas."""

    SPLIT = "each replica gets its equal part"
    WHOLE = "every replica gets all rows and computes the same"
    PADDED = "filled up to a size that divides, and split"


class BatchPolicy:
    """Chooses the mode of each batch of a model.

    The size of the first batch of a call of `fit`, `evaluate` or `predict` is taken for the usual one of
    that call; another one is the ragged last.
    """

    def __init__(self, model: keras.Model, replicas: int) -> None:
        self._model, self._replicas = model, replicas
        #: Of the running call; None until its first batch.
        self.usual_rows: int | None = None
        self._can_pad: bool | None = None
        self._is_fixed: bool | None = None
        self._shapes: set[tuple[tuple[int, ...], ...]] = set()

    def _say(self, level: int, text: str) -> None:
        """Log a line, once for a model."""
        said = _SAID.setdefault(self._model, set())
        if text not in said:
            said.add(text)
            _LOG.log(level, "%s", text)

    def warn(self, text: str) -> None:
        """Log a warning, once for a model."""
        self._say(logging.WARNING, text)

    def note_shapes(self, batch: PyTree) -> None:
        """Warn where batches of many shapes are given, each of which makes a program."""
        if len(self._shapes) == _MANY_SHAPES:
            return
        self._shapes.add(tuple(np.shape(x)[1:] for x in jax.tree.leaves(batch)))
        if len(self._shapes) == _MANY_SHAPES:
            self.warn(
                f"Batches had {_MANY_SHAPES} shapes of rows, and a program is compiled for each, which "
                "takes longer than its steps. Where each batch is padded to its own length, write "
                "`dataset.padded_batch(size, padded_shapes=([128], []))` for one length, or "
                "`dataset.bucket_by_sequence_length(..., pad_to_bucket_boundary=True)` for a few.",
            )

    def mode_of(self, batch: PyTree) -> tuple[Mode, int]:
        """Return how a batch reaches the replicas, and its number of rows."""
        rows = rows_in(batch)
        self.note_shapes(batch)
        return self.mode(rows), rows

    def mode(self, rows: int) -> Mode:
        """Return how a batch with this number of rows reaches the replicas."""
        replicas = self._replicas
        if self._is_fixed is None:
            self._is_fixed = replicas > 1 and self._has_one_size()
        if self.usual_rows is None:
            self.usual_rows = rows
        if self._is_fixed:
            return Mode.WHOLE
        if rows % replicas == 0 and rows > 0:
            return Mode.SPLIT
        # A ragged last batch: to pad it would be a program of its own too, and only some models allow it.
        if rows != self.usual_rows or rows < replicas:
            return Mode.WHOLE
        if self._can_pad is None:
            self._can_pad = self._decide_padding(rows, replicas)
        return Mode.PADDED if self._can_pad else Mode.WHOLE

    def _has_one_size(self) -> bool:
        reason = one_batch_size(self._model)
        if reason:
            self.warn(
                f"A batch cannot be split over {self._replicas} replicas, because {reason}: every replica "
                "computes all rows, which is exact but no faster than one device.",
            )
        return reason is not None

    def _decide_padding(self, rows: int, replicas: int) -> bool:
        reason = depends_on_batch(self._model)
        size = -(-rows // replicas) * replicas
        what = f"A batch of {rows} rows does not divide over {replicas} replicas"
        if reason:
            self.warn(
                f"{what}, and {reason}: every replica computes all rows, which is exact but no faster than "
                f"one device. Use a batch size of {size}.",
            )
        else:
            self._say(
                logging.INFO,
                f"{what}: it is filled up and split. A batch size of {size} wastes nothing.",
            )
        return reason is None


def rows_in(batch: PyTree) -> int:
    """Return the number of rows of a batch.

    Raises:
        InvalidArgumentError: when its arrays have none, or not the same number.

    >>> rows_in((np.zeros((4, 2)), np.zeros(4), None))
    4
    """
    numbers = {np.shape(x)[:1] for x in jax.tree.leaves(batch)}
    if len(numbers) != 1 or not (rows := numbers.pop()):
        raise _without_rows(batch)
    return int(rows[0])


def _without_rows(batch: PyTree) -> InvalidArgumentError | InvalidTypeError:
    """Return the error for a batch without rows, or with arrays of different numbers of rows."""
    sizes = [(path, np.shape(x)) for path, x in jax.tree_util.tree_leaves_with_path(batch)]
    if not sizes:
        return InvalidArgumentError(
            "A batch must hold at least one array. Received: an empty batch. Yield `(x, y)` from the data."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not np.ndim(leaf):
            return unbatched(f"batch{jax.tree_util.keystr(path)}", leaf)
    path, first = sizes[0]
    other, shape = next(size for size in sizes if size[1][0] != first[0])
    return InvalidArgumentError(
        f"All arrays of a batch must have the same number of rows. Received: shape {shape} at "
        f"batch{jax.tree_util.keystr(other)}, and {first} at batch{jax.tree_util.keystr(path)}. Give every "
        "array one row for each example."
    )


def pad_rows(array: Array, parts: int) -> Array:
    """Repeat the last row until the number of rows divides by `parts`.

    True rows, and not zeros, because a row of zeros may give NaN where a true one does not.

    >>> pad_rows(np.array([1, 2, 3]), 2)
    array([1, 2, 3, 3])
    """
    missing = -len(array) % parts
    if missing == 0:
        return array
    if isinstance(array, np.ndarray):
        return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])
    return jnp.concatenate([array, jnp.repeat(array[-1:], missing, axis=0)])


def depends_on_batch(model: keras.Model) -> str | None:
    """Return why a model may not see padded rows, or None when every layer treats rows apart."""
    if not _is_keras_own(model):
        return f"the model is of the class {type(model).__name__}, whose code may mix rows"
    for layer in all_layers(model, include_self=False):
        reason = _layer_mixes_rows(layer)
        if reason:
            return reason
    nested = [layer for layer in all_layers(model) if isinstance(layer, keras.Model)]
    for part in nested:
        for operation in getattr(part, "operations", ()):
            if not isinstance(operation, keras.Layer):
                return f"the operation {operation.name!r} may mix rows"
    return None


def one_batch_size(model: keras.Model) -> str | None:
    """Return why a model takes batches of one size only, or None when it takes any."""
    for layer in all_layers(model):
        name = f"the layer {layer.name!r} ({type(layer).__name__})"
        if getattr(layer, "stateful", False):
            return f"{name} keeps a state for each row"
        if isinstance(layer, keras.layers.InputLayer) and not getattr(layer, _FROM_DATA, False):
            rows = layer.batch_shape[0]
            if rows is not None:
                return f"{name} takes {rows} rows (write its shape without them if it takes any number)"
    return None


def wraps() -> list[KerasWrap]:
    """Return what is wrapped of `keras.Sequential`."""
    return [(keras.Sequential, "build", build_sequential)]


def build_sequential(
    original: Callable[..., None], self: keras.Sequential, *args: object, **kwargs: object
) -> None:
    """Build a `keras.Sequential`, and note whether its input's shape is only that of the first batch.

    Keras makes the input of a model without one from the first data, with their number of rows, and
    accepts any other number afterwards. A user who writes `Input(batch_shape=...)` asks for that number.
    """
    declared = any(isinstance(layer, keras.layers.InputLayer) for layer in layers_with_input(self)[:1])
    original(self, *args, **kwargs)
    first = next(iter(layers_with_input(self)), None)
    if not declared and isinstance(first, keras.layers.InputLayer):
        object.__setattr__(first, _FROM_DATA, True)


def _is_keras_own(layer: keras.Layer) -> bool:
    """Return whether a layer's code is Keras' and not a user's."""
    return type(layer).__module__.startswith("keras.")


def _layer_mixes_rows(layer: keras.Layer) -> str | None:
    if isinstance(layer, keras.Model) and _is_keras_own(layer):
        return None  # its own layers are checked one by one
    name = f"the layer {layer.name!r} ({type(layer).__name__})"
    is_part = _is_keras_own(layer) and type(layer).__name__ in _PARTS
    if type(layer) not in ROW_WISE and not is_part:
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


def _crosses_batch(layer: keras.Layer) -> bool:
    if any(axis == 0 or axis < -1 for axis in named_axes(layer)):
        return True
    equation = getattr(layer, "equation", None)
    if isinstance(layer, keras.layers.EinsumDense) and equation is not None:
        inputs, result = equation.replace(" ", "").split("->")
        return bool(inputs[0] != result[0])
    return False
