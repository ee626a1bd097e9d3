"""Categorical columns: vocabularies, identities and hashes of one feature, crosses and weights of others.

Source: https://www.tensorflow.org/api_docs/python/tf/feature_column

Tests: tests/unit/feature_column/test_columns.py.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Literal

import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono.feature_column._column import (
    CategoricalColumn,
    Features,
    KeyColumn,
    Values,
    checked_key,
    is_missing,
    raw_values,
)
from unisono.preprocessing._fingerprints import (
    CROSS_KEY,
    crossed_buckets,
    hash_buckets,
    on_host,
    terms_of_file,
)


@dataclasses.dataclass(frozen=True)
class VocabularyColumn(KeyColumn, CategoricalColumn):
    """The index of a value in a vocabulary; made by the functions with "vocabulary" in their names."""

    vocabulary: tuple[bytes | int, ...]
    default_value: int = -1
    num_oov_buckets: int = 0

    @property
    def kind(self) -> str:
        """A text that distinguishes columns of one name."""
        return "vocabulary"

    @property
    def num_buckets(self) -> int:
        """The number of categories, with unknown values' own."""
        return len(self.vocabulary) + self.num_oov_buckets

    def values(self, features: Features) -> Values:
        raw = raw_values(features, self.key)
        if (raw.dtype.kind == "O") != isinstance(self.vocabulary[0], bytes) or raw.dtype.kind == "f":
            raise InvalidTypeError(
                f"The feature {self.key!r} and its vocabulary must both be of strings or of integers. "
                f"Received: a feature of {_kind(raw)}, and {self.vocabulary[0]!r} in the vocabulary."
            )
        table, flat = _index(self.vocabulary), raw.ravel()
        ids = np.fromiter((table.get(value, -1) for value in flat.tolist()), np.int64, flat.size)
        unknown = ids < 0
        if unknown.any():
            buckets = self.num_oov_buckets
            ids[unknown] = (
                len(self.vocabulary) + hash_buckets(flat[unknown], buckets) if buckets else self.default_value
            )
        return Values(ids.reshape(raw.shape), ~is_missing(raw))


@functools.lru_cache(maxsize=256)
def _index(vocabulary: tuple[bytes | int, ...]) -> dict[bytes | int, int]:
    return {term: index for index, term in enumerate(vocabulary)}


def _kind(array: np.ndarray) -> str:
    return "strings" if array.dtype.kind == "O" else str(array.dtype)


@dataclasses.dataclass(frozen=True)
class IdentityColumn(KeyColumn, CategoricalColumn):
    """Integers that are categories already; made by `categorical_column_with_identity`."""

    buckets: int
    default_value: int | None = None

    @property
    def kind(self) -> str:
        """A text that distinguishes columns of one name."""
        return f"identity_{self.buckets}"

    @property
    def num_buckets(self) -> int:
        return self.buckets

    def values(self, features: Features) -> Values:
        raw = raw_values(features, self.key)
        if raw.dtype.kind not in "iub":
            raise InvalidTypeError(
                f"categorical_column_with_identity({self.key!r}) takes integers. Received: {_kind(raw)}."
            )
        ids, present = raw.astype(np.int64), ~is_missing(raw)
        outside = present & ((ids < 0) | (ids >= self.buckets))
        if outside.any():
            if self.default_value is None:
                raise InvalidArgumentError(
                    f"categorical_column_with_identity({self.key!r}) takes integers from 0 to "
                    f"{self.buckets - 1}. Received: {ids[outside][:5].tolist()}. Set default_value; -1 "
                    "stands for missing values."
                )
            ids = np.where(outside, self.default_value, ids)
        return Values(ids, present)


@dataclasses.dataclass(frozen=True)
class HashedColumn(KeyColumn, CategoricalColumn):
    """The hash of a value; made by `categorical_column_with_hash_bucket`."""

    hash_bucket_size: int

    @property
    def kind(self) -> str:
        """A text that distinguishes columns of one name."""
        return f"hash_{self.hash_bucket_size}"

    @property
    def num_buckets(self) -> int:
        return self.hash_bucket_size

    def values(self, features: Features) -> Values:
        raw = raw_values(features, self.key)
        if raw.dtype.kind == "f":
            raise InvalidTypeError(
                f"categorical_column_with_hash_bucket({self.key!r}) takes strings or integers. "
                f"Received: {_kind(raw)}."
            )
        return Values(hash_buckets(raw, self.hash_bucket_size), ~is_missing(raw))


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
        """A text that distinguishes columns of one name."""
        return f"hash_{self.hash_bucket_size}"

    @property
    def num_buckets(self) -> int:
        return self.hash_bucket_size

    def leaves(self) -> list[str | CategoricalColumn]:
        """Return the crossed columns, with the parts of crosses in their places."""
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
        """A text that distinguishes columns of one name."""
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


def categorical_column_with_vocabulary_list(
    key: str,
    vocabulary_list: Sequence[str | bytes | int],
    dtype: object = None,
    default_value: int = -1,
    num_oov_buckets: int = 0,
) -> VocabularyColumn:
    """Describe strings or integers by their index in a list.

    Args:
        key: of the feature.
        vocabulary_list: the values, each once.
        dtype: accepted; the list says it.
        default_value: the category of unknown values; -1 for none.
        num_oov_buckets: how many further categories unknown values share by hash.

    Returns:
        A categorical column.

    Raises:
        InvalidArgumentError: the list is empty, has a value twice, or both ways for unknown values are given.

    >>> categorical_column_with_vocabulary_list("color", ["red", "green"]).num_buckets
    2
    """
    terms = tuple(on_host(list(vocabulary_list), "vocabulary_list").tolist())
    if not terms or len(set(terms)) < len(terms):
        raise InvalidArgumentError(
            f"vocabulary_list must have values, each once. Received: {vocabulary_list!r:.200} for {key!r}."
        )
    return _vocabulary_column(key, terms, default_value, num_oov_buckets)


def _vocabulary_column(
    key: str, terms: tuple[bytes | int, ...], default_value: int | None, num_oov_buckets: int | None
) -> VocabularyColumn:
    default = -1 if default_value is None else default_value
    buckets = num_oov_buckets or 0
    if buckets < 0 or (buckets and default != -1):
        raise InvalidArgumentError(
            "Unknown values have either a default_value or num_oov_buckets of 1 and more. "
            f"Received: default_value={default_value}, num_oov_buckets={num_oov_buckets} for {key!r}."
        )
    return VocabularyColumn(checked_key(key), terms, default, buckets)


def categorical_column_with_vocabulary_file(
    key: str,
    vocabulary_file: str | os.PathLike[str],
    vocabulary_size: int | None = None,
    dtype: object = "string",
    default_value: int | None = None,
    num_oov_buckets: int = 0,
    file_format: Literal["text"] | None = None,
) -> VocabularyColumn:
    """Describe strings or integers by the number of their line in a file, which is read at once.

    Args:
        key: of the feature.
        vocabulary_file: a text file with a value in each line.
        vocabulary_size: how many lines count; all by default.
        dtype: "string", or an integer type.
        default_value: the category of unknown values; None for none.
        num_oov_buckets: how many further categories unknown values share by hash.
        file_format: None or "text".

    Returns:
        A categorical column.

    Raises:
        InvalidArgumentError: the file has fewer lines, or other text than integers, or an argument cannot
            be used.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "colors.txt")
    >>> path.write_text("red")
    3
    >>> categorical_column_with_vocabulary_file("color", path).num_buckets
    1
    """
    if file_format not in (None, "text"):
        raise InvalidArgumentError(f"vocabulary_file must be a text file. Received: {file_format=}.")
    is_integer = str(getattr(dtype, "name", dtype)).startswith(("int", "uint"))
    lines = terms_of_file(os.fspath(vocabulary_file), is_integer)
    size = len(lines) if vocabulary_size is None else vocabulary_size
    if not 0 < size <= len(lines):
        raise InvalidArgumentError(
            f"vocabulary_size must be 1 to the number of lines. Received: {size}, and {len(lines)} lines "
            f"in {os.fspath(vocabulary_file)}."
        )
    return _vocabulary_column(key, tuple(lines[:size]), default_value, num_oov_buckets)


def categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> IdentityColumn:
    """Describe integers that are categories already.

    Args:
        key: of the feature.
        num_buckets: how many categories there are.
        default_value: the category of other integers; None makes them errors. -1 is a missing value.

    Returns:
        A categorical column.

    Raises:
        InvalidArgumentError: a number is out of range.

    >>> categorical_column_with_identity("weekday", 7).num_buckets
    7
    """
    if num_buckets < 1 or not (default_value is None or 0 <= default_value < num_buckets):
        raise InvalidArgumentError(
            "num_buckets must be at least 1, and default_value one of the categories. "
            f"Received: num_buckets={num_buckets}, default_value={default_value} for {key!r}."
        )
    return IdentityColumn(checked_key(key), num_buckets, default_value)


def categorical_column_with_hash_bucket(
    key: str, hash_bucket_size: int, dtype: object = "string"
) -> HashedColumn:
    """Describe strings or integers by TensorFlow's hash.

    Args:
        key: of the feature.
        hash_bucket_size: how many categories there are.
        dtype: accepted; the feature says it.

    Returns:
        A categorical column.

    Raises:
        InvalidArgumentError: there is no category.

    >>> categorical_column_with_hash_bucket("city", 100).num_buckets
    100
    """
    if hash_bucket_size is None or hash_bucket_size < 1:
        raise InvalidArgumentError(
            f"hash_bucket_size must be at least 1. Received: {hash_bucket_size} for {key!r}."
        )
    return HashedColumn(checked_key(key), hash_bucket_size)


def crossed_column(
    keys: Sequence[str | CategoricalColumn], hash_bucket_size: int, hash_key: int | None = None
) -> CrossedColumn:
    """Describe combinations of values by TensorFlow's hash.

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
