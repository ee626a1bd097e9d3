"""`Hashing` and `HashedCrossing` on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import keras
import numpy as np

from unisono._checks import checked_whole
from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono.preprocessing import _fingerprints
from unisono.preprocessing._encoding import checked_mode, encoded, encoded_shape

_BINS = "Write how many buckets there are, such as num_bins=1000."


def prepare_host_layer(layer: keras.layers.Layer) -> None:
    """Let a layer take strings and arrays as they are, and keep it out of compiled steps."""
    layer._convert_input_args = False
    layer._allow_non_tensor_positional_args = True
    layer.supports_jit = False
    # Read where a model is trained: `training/_host_layers`.
    layer.computes_on_host = True


def refuse_sparse(sparse: bool, layer: str) -> None:
    """Raise an error for `sparse=True`."""
    if sparse:
        raise UnsupportedError(
            f"{layer} has no sparse output: the arrays are NumPy's. Received: sparse=True. "
            'Use output_mode="int" with an Embedding layer.'
        )


@keras.saving.register_keras_serializable("unisono")
class Hashing(keras.layers.Layer):
    """Map strings or integers to buckets, as `keras.layers.Hashing` does with TensorFlow.

    Args:
        num_bins: the number of buckets, with the one of `mask_value`.
        mask_value: a value that goes to bucket 0 alone; None for none.
        salt: None; a salted hash (SipHash) does not exist here.
        output_mode: "int", "one_hot", "multi_hot" or "count".
        sparse: False.
        **kwargs: arguments of any layer.

    Raises:
        InvalidArgumentError: an argument is out of range.
        InvalidTypeError: `num_bins` is not a whole number.
        UnsupportedError: `salt` or `sparse` is set.

    >>> Hashing(num_bins=3)([["A"], ["B"], ["C"]]).tolist()
    [[1], [0], [1]]
    """

    def __init__(
        self,
        num_bins: int,
        mask_value: str | bytes | int | None = None,
        salt: int | Sequence[int] | None = None,
        output_mode: Literal["int", "one_hot", "multi_hot", "count"] = "int",
        sparse: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        refuse_sparse(sparse, "Hashing")
        if salt is not None:
            raise UnsupportedError(
                "Hashing has FarmHash alone, no salted hash. "
                f"Received: salt={salt}. Leave it out, or use Keras' layer with TensorFlow installed."
            )
        self.num_bins = checked_whole(num_bins, "num_bins", 1, _BINS)
        self.mask_value = mask_value
        self.output_mode = checked_mode(output_mode, "Hashing")
        prepare_host_layer(self)

    def call(self, inputs: object) -> np.ndarray:
        """Return the buckets of values, as int64, or their encoding."""
        values = _fingerprints.on_host(inputs, "Hashing")
        buckets = self._buckets(values)
        return encoded(buckets, self.output_mode, self.num_bins)

    def _buckets(self, values: np.ndarray) -> np.ndarray:
        if self.mask_value is None or self.num_bins == 1:
            return _fingerprints.hash_buckets(values, self.num_bins)
        mask = _fingerprints.on_host(self.mask_value, "Hashing")[()]
        buckets = _fingerprints.hash_buckets(values, self.num_bins - 1) + 1
        return np.where(values == mask, 0, buckets)

    def compute_output_spec(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Return the shape and dtype of the output for a symbolic input."""
        shape = encoded_shape(tuple(inputs.shape), self.output_mode, self.num_bins)
        return keras.KerasTensor(shape, "int64" if self.output_mode == "int" else keras.config.floatx())

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {
            **super().get_config(),
            "num_bins": self.num_bins,
            "mask_value": self.mask_value,
            "output_mode": self.output_mode,
        }


@keras.saving.register_keras_serializable("unisono")
class HashedCrossing(keras.layers.Layer):
    """Map pairs (or more) of values to buckets, as `keras.layers.HashedCrossing` does with TensorFlow.

    Args:
        num_bins: how many buckets there are.
        output_mode: "int" or "one_hot".
        sparse: False.
        **kwargs: arguments of any layer.

    Raises:
        InvalidArgumentError: `num_bins` is below 1.
        InvalidTypeError: `num_bins` is not a whole number.
        UnsupportedError: `sparse` is set.

    >>> HashedCrossing(num_bins=5)((["A", "B", "A", "B", "A"], [101, 101, 101, 102, 102])).tolist()
    [1, 4, 1, 1, 3]
    """

    def __init__(
        self,
        num_bins: int,
        output_mode: Literal["int", "one_hot"] = "int",
        sparse: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        refuse_sparse(sparse, "HashedCrossing")
        self.num_bins = checked_whole(num_bins, "num_bins", 1, _BINS)
        self.output_mode = checked_mode(output_mode, "HashedCrossing", ("int", "one_hot"))
        prepare_host_layer(self)

    def call(self, inputs: Sequence[object]) -> np.ndarray:
        """Return the buckets of combinations, as int64, or their encoding."""
        columns = [_fingerprints.on_host(column, "HashedCrossing") for column in inputs]
        if len(columns) < 2 or len({column.shape for column in columns}) > 1:
            raise InvalidArgumentError(
                "HashedCrossing takes two or more inputs of one shape. "
                f"Received: shapes {[column.shape for column in columns]}."
            )
        return encoded(_fingerprints.crossed_buckets(columns, self.num_bins), self.output_mode, self.num_bins)

    def compute_output_spec(self, inputs: Sequence[keras.KerasTensor]) -> keras.KerasTensor:
        """Return the shape and dtype of the output for symbolic inputs."""
        shape = encoded_shape(tuple(inputs[0].shape), self.output_mode, self.num_bins)
        return keras.KerasTensor(shape, "int64" if self.output_mode == "int" else keras.config.floatx())

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {**super().get_config(), "num_bins": self.num_bins, "output_mode": self.output_mode}
