"""`numeric_column` and `bucketized_column`.

Source: https://www.tensorflow.org/api_docs/python/tf/feature_column

Tests: tests/unit/feature_column/test_columns.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._checks import whole_numbers
from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono.feature_column._column import (
    CategoricalColumn,
    DenseColumn,
    Features,
    KeyColumn,
    Values,
    checked_key,
    is_traced,
    raw_feature,
    raw_values,
)


@dataclasses.dataclass(frozen=True)
class NumericColumn(KeyColumn, DenseColumn):
    """Numbers as they are; made by `numeric_column`."""

    shape: tuple[int, ...] = (1,)
    normalizer_fn: Callable[[Any], Any] | None = None

    @property
    def width(self) -> int:
        return math.prod(self.shape)

    def dense(self, features: Features) -> jax.Array:
        """Return floats of shape `(batch, width)`, in the step."""
        value = raw_feature(features, self.key)
        if not is_traced(value) and np.asarray(value).dtype.kind in "USO":
            raise InvalidTypeError(
                f"numeric_column({self.key!r}) takes numbers. Received: strings. "
                "Use a categorical column, and an indicator or embedding column around it."
            )
        numbers = jnp.asarray(value, keras.config.floatx())
        numbers = jnp.reshape(numbers, (*numbers.shape, 1)) if numbers.ndim == 1 else numbers
        if numbers.shape[1:] != self.shape:
            raise InvalidArgumentError(
                f"numeric_column({self.key!r}, shape={self.shape}) needs a feature of shape "
                f"(batch, {', '.join(map(str, self.shape))}). Received: {numbers.shape}."
            )
        if self.normalizer_fn is not None:
            numbers = jnp.asarray(self.normalizer_fn(numbers))
        return jnp.reshape(numbers, (-1, self.width))


@dataclasses.dataclass(frozen=True)
class BucketizedColumn(DenseColumn, CategoricalColumn):
    """Buckets of numbers between boundaries; made by `bucketized_column`."""

    source_column: NumericColumn
    boundaries: tuple[float, ...]

    @property
    def name(self) -> str:
        """The source's name with "_bucketized"."""
        return f"{self.source_column.name}_bucketized"

    @property
    def kind(self) -> str:
        """A text that distinguishes columns of one name."""
        return f"{len(self.boundaries) + 1}_buckets"

    @property
    def num_buckets(self) -> int:
        """How many buckets all the source's numbers have."""
        return (len(self.boundaries) + 1) * self.source_column.width

    @property
    def width(self) -> int:
        """How many numbers a row has: one for each bucket."""
        return self.num_buckets

    def feature_keys(self) -> tuple[str, ...]:
        """Return the key of the source's feature."""
        return self.source_column.feature_keys()

    def buckets(self, features: Features) -> jax.Array:
        """Return the bucket of each number, shape `(batch, numbers)`, in the step."""
        numbers = self.source_column.dense(features)
        return jnp.digitize(numbers, jnp.asarray(self.boundaries, numbers.dtype))

    def ids(self, features: Features) -> jax.Array:
        """Return categories, shape `(batch, numbers)`, in the step: each number has buckets of its own."""
        buckets = self.buckets(features)
        return buckets + jnp.arange(buckets.shape[1]) * (len(self.boundaries) + 1)

    def dense(self, features: Features) -> jax.Array:
        """Return a one for each number's bucket, shape `(batch, width)`, in the step."""
        size = len(self.boundaries) + 1
        hot = self.buckets(features)[..., None] == jnp.arange(size)
        return jnp.reshape(hot, (-1, self.width)).astype(keras.config.floatx())

    def values(self, features: Features) -> Values:
        raw_values(features, self.source_column.key)
        ids = np.asarray(self.ids(features), np.int64)
        return Values(ids, np.ones(ids.shape, bool))


def numeric_column(
    key: str,
    shape: int | Sequence[int] = (1,),
    default_value: object = None,
    dtype: object = "float32",
    normalizer_fn: Callable[[Any], Any] | None = None,
) -> NumericColumn:
    """Describe numbers that a model reads as they are.

    Args:
        key: of the feature.
        shape: of a row.
        default_value: accepted; rows that lack a feature exist in TensorFlow's record files only.
        dtype: accepted; numbers become floats of Keras' default type.
        normalizer_fn: what to do with the numbers first, with Keras' or JAX's operations.

    Returns:
        A dense column.

    Raises:
        InvalidArgumentError: the shape is not made of positive integers.

    >>> numeric_column("age").name
    'age'
    """
    sizes = whole_numbers((shape,) if isinstance(shape, int) else shape, 1)
    if sizes is None:
        raise InvalidArgumentError(
            f"numeric_column's shape must be of positive integers. Received: shape={shape!r} for {key!r}."
        )
    if normalizer_fn is not None and not callable(normalizer_fn):
        raise InvalidTypeError(f"normalizer_fn must be a function. Received: {normalizer_fn!r}.")
    return NumericColumn(checked_key(key), tuple(sizes), normalizer_fn)


def bucketized_column(source_column: NumericColumn, boundaries: Sequence[float]) -> BucketizedColumn:
    """Describe the buckets into which numbers fall: `[b0, b1)` and so on.

    Args:
        source_column: a numeric column of one number, or of several in one dimension.
        boundaries: sorted.

    Returns:
        A column that is dense and categorical.

    Raises:
        InvalidArgumentError: the boundaries are not sorted, or the source is no such column.

    >>> bucketized_column(numeric_column("age"), [18, 65]).num_buckets
    3
    """
    if not isinstance(source_column, NumericColumn) or len(source_column.shape) > 1:
        raise InvalidArgumentError(
            f"bucketized_column's source must be a numeric column of one dimension. "
            f"Received: {source_column!r}."
        )
    sorted_boundaries = tuple(float(boundary) for boundary in boundaries)
    if not sorted_boundaries or any(a >= b for a, b in itertools.pairwise(sorted_boundaries)):
        raise InvalidArgumentError(
            f"boundaries must be a sorted list without repetitions. Received: {boundaries!r}."
        )
    return BucketizedColumn(source_column, sorted_boundaries)
