"""Categorical columns made of others: crosses and weights.

Source: https://www.tensorflow.org/api_docs/python/tf/feature_column

Tests: tests/unit/feature_column/test_columns.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono.feature_column._categorical import HashedColumn
from unisono.feature_column._column import CategoricalColumn, Features, Values, checked_key, raw_values
from unisono.preprocessing._fingerprints import CROSS_KEY, crossed_buckets


@dataclasses.dataclass(frozen=True)
class CrossedColumn(CategoricalColumn):
    """The hash of combinations of values; made by `crossed_column`."""

    crossed: tuple[str | CategoricalColumn, ...]
    hash_bucket_size: int
    hash_key: int | None = None

    @property
    def name(self) -> str:
        """The names of what is crossed, sorted, with "_X_" between them."""
        return "_X_".join(sorted(leaf if isinstance(leaf, str) else leaf.name for leaf in self.leaves()))

    @property
    def kind(self) -> str:
        """What distinguishes the column from others of its name."""
        return f"hash_{self.hash_bucket_size}"

    @property
    def num_buckets(self) -> int:
        return self.hash_bucket_size

    def leaves(self) -> list[str | CategoricalColumn]:
        """Return what is crossed, with the parts of crosses in their places."""
        return [
            leaf
            for part in self.crossed
            for leaf in (part.leaves() if isinstance(part, CrossedColumn) else [part])
        ]

    def feature_keys(self) -> tuple[str, ...]:
        """Return the keys of the features."""
        return tuple(
            key
            for leaf in self.leaves()
            for key in ((leaf,) if isinstance(leaf, str) else leaf.feature_keys())
        )

    def values(self, features: Features) -> Values:
        # TensorFlow's operation takes columns, which are sparse, before keys.
        leaves = sorted(self.leaves(), key=lambda leaf: isinstance(leaf, str))
        arrays, masks = zip(*(_leaf_values(leaf, features) for leaf in leaves), strict=True)
        axes = len(arrays)
        # One axis for each column: a row's combinations are all products of its values.
        spread = [_spread(array, axis, axes) for axis, array in enumerate(arrays)]
        present = np.array(True)
        for axis, mask in enumerate(masks):
            present = present & _spread(mask, axis, axes)
        key = CROSS_KEY if self.hash_key is None else self.hash_key
        ids = crossed_buckets(spread, self.hash_bucket_size, key)
        rows = len(arrays[0])
        return Values(ids.reshape(rows, -1), present.reshape(rows, -1))


def _leaf_values(leaf: str | CategoricalColumn, features: Features) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(leaf, CategoricalColumn):
        values = leaf.values(features)
        return values.ids, values.present
    raw = raw_values(features, leaf)
    if raw.dtype.kind == "f":
        # As TensorFlow casts what it crosses.
        raw = raw.astype(np.int64)
    # As in TensorFlow, "" and -1 of a feature that is crossed by its key are values like others.
    return raw, np.ones(raw.shape, bool)


def _spread(array: np.ndarray, axis: int, axes: int) -> np.ndarray:
    shape = [len(array)] + [1] * axes
    shape[axis + 1] = array.shape[1]
    return array.reshape(shape)


@dataclasses.dataclass(frozen=True)
class WeightedColumn(CategoricalColumn):
    """Categories whose weights are another feature; made by `weighted_categorical_column`."""

    categorical_column: CategoricalColumn
    weight_feature_key: str

    @property
    def name(self) -> str:
        """The names of both features."""
        return f"{self.categorical_column.name}_weighted_by_{self.weight_feature_key}"

    @property
    def kind(self) -> str:
        """What distinguishes the column from others of its name."""
        return self.categorical_column.kind

    @property
    def weights_key(self) -> str | None:
        """The key of the weights in encoded features."""
        return f"{self.encoded_key}/weights"

    @property
    def num_buckets(self) -> int:
        return self.categorical_column.num_buckets

    def feature_keys(self) -> tuple[str, ...]:
        """Return the keys of the features."""
        return (*self.categorical_column.feature_keys(), self.weight_feature_key)

    def values(self, features: Features) -> Values:
        """Return the categories of a batch and their weights, computed on the host."""
        values = self.categorical_column.values(features)
        weights = raw_values(features, self.weight_feature_key).astype(np.float32)
        if weights.shape != values.ids.shape:
            raise InvalidArgumentError(
                f"The weights {self.weight_feature_key!r} must have the shape of "
                f"{self.categorical_column.name!r}. Received: {weights.shape} and {values.ids.shape}."
            )
        return Values(values.ids, values.present, weights)


def crossed_column(
    keys: Sequence[str | CategoricalColumn], hash_bucket_size: int, hash_key: int | None = None
) -> CrossedColumn:
    """Describe combinations of values by their hash, which is that of TensorFlow.

    Args:
        keys: keys of features with strings or integers, and categorical columns other than hashed ones.
        hash_bucket_size: how many categories there are.
        hash_key: the seed of the hash; TensorFlow's by default.

    Returns:
        A categorical column.

    Raises:
        InvalidArgumentError: there are fewer than two keys, a column cannot be crossed, or no category.

    >>> crossed_column(["city", "weekday"], 100).name
    'city_X_weekday'
    """
    if not keys or len(keys) < 2 or hash_bucket_size < 1:
        raise InvalidArgumentError(
            "crossed_column takes two or more keys, and a hash_bucket_size of at least 1. "
            f"Received: keys={keys!r}, hash_bucket_size={hash_bucket_size}."
        )
    for key in keys:
        if isinstance(key, (HashedColumn, WeightedColumn)) or not isinstance(key, (str, CategoricalColumn)):
            raise InvalidArgumentError(
                "crossed_column crosses keys and categorical columns, but hashed ones: write the key of such "
                f"a feature itself. Received: {key!r}."
            )
    return CrossedColumn(tuple(keys), hash_bucket_size, hash_key)


def weighted_categorical_column(
    categorical_column: CategoricalColumn, weight_feature_key: str, dtype: object = "float32"
) -> WeightedColumn:
    """Describe categories that do not count alike.

    Args:
        categorical_column: the categories.
        weight_feature_key: the feature with their weights, of the categories' shape.
        dtype: accepted; weights become floats.

    Returns:
        A categorical column.

    Raises:
        InvalidTypeError: the first argument is no categorical column.

    >>> from unisono.feature_column import categorical_column_with_hash_bucket
    >>> words = categorical_column_with_hash_bucket("words", 100)
    >>> weighted_categorical_column(words, "counts").name
    'words_weighted_by_counts'
    """
    if not isinstance(categorical_column, CategoricalColumn):
        raise InvalidTypeError(
            f"weighted_categorical_column takes a categorical column. Received: {categorical_column!r}."
        )
    return WeightedColumn(categorical_column, checked_key(weight_feature_key))
