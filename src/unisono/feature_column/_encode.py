"""Strings, hashes and crosses become integers on the host, before a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono.feature_column._column import (
    CategoricalColumn,
    DenseColumn,
    FeatureColumn,
    Features,
    is_traced,
    raw_feature,
)
from unisono.feature_column._dense import DenseCategories
from unisono.feature_column._numeric import BucketizedColumn, NumericColumn


def checked_columns(columns: FeatureColumn | Iterable[FeatureColumn], caller: str) -> list[FeatureColumn]:
    """Return columns as a list."""
    if isinstance(columns, dict):
        raise InvalidTypeError(f"{caller} takes a list of feature columns. Received: a dict.")
    listed = [columns] if isinstance(columns, FeatureColumn) else list(columns)
    for column in listed:
        if not isinstance(column, FeatureColumn):
            raise InvalidTypeError(
                f"{caller} takes feature columns, as unisono.feature_column makes them. Received: {column!r}."
            )
    names = [column.name for column in listed]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if not listed or repeated:
        raise InvalidArgumentError(
            f"{caller} takes one feature column or more, each with a name of its own. "
            f"Received twice: {repeated}, of {len(listed)} columns."
        )
    return listed


def categories_of(column: FeatureColumn) -> CategoricalColumn | None:
    """Return the categorical column that must be encoded for a column, or None."""
    if isinstance(column, DenseCategories):
        return categories_of(column.categorical_column)
    if isinstance(column, CategoricalColumn) and not isinstance(column, BucketizedColumn):
        return column
    return None


def host_values(column: CategoricalColumn, features: Features) -> dict[str, np.ndarray]:
    """Return the entries of one column in encoded features.

    Returns:
        int32 categories, -1 where there is none, and float32 weights where the column has them.
    """
    values = column.values(features)
    entries = {column.encoded_key: np.where(values.present, values.ids, -1).astype(np.int32)}
    if column.weights_key is not None and values.weights is not None:
        entries[column.weights_key] = values.weights
    return entries


class FeatureEncoder:
    """Makes of a batch's raw features those that a step can take; for `dataset.map`, after `batch`."""

    def __init__(self, columns: Sequence[FeatureColumn], kept: Iterable[str] = ()) -> None:
        self._categories: dict[str, CategoricalColumn] = {}
        dense: set[str] = set()
        for column in columns:
            categories = categories_of(column)
            if categories is None:
                dense.update(column.feature_keys())
            elif self._categories.setdefault(categories.encoded_key, categories) != categories:
                raise InvalidArgumentError(
                    "Two categorical columns of one feature and kind cannot be in one model. "
                    f"Received: two of {categories.encoded_key!r}. Give the model the feature under two keys."
                )
        self._dense, self._kept = dense, set(kept)

    def __call__(self, features: Features, *rest: object) -> Any:
        """Return encoded features, and what else an element has as it is."""
        if not hasattr(features, "keys"):
            raise InvalidTypeError(
                f"Features must be a dict of arrays by key. Received: {type(features).__name__}. "
                "Let input_fn return ({'age': ages, ...}, labels)."
            )
        encoded: dict[str, Any] = {}
        for key, column in self._categories.items():
            if key in features:
                encoded.update({k: features[k] for k in (key, column.weights_key) if k is not None})
            else:
                encoded.update(host_values(column, features))
        for key in sorted(self._dense | (self._kept & set(features))):
            value = raw_feature(features, key)
            encoded[key] = value if hasattr(value, "shape") else np.asarray(value)
        return (encoded, *rest) if rest else encoded


def encode(
    feature_columns: FeatureColumn | Iterable[FeatureColumn],
) -> Callable[..., Any]:
    """Return the function for `dataset.map` that makes of raw features those that a step can take.

    Strings cannot enter a compiled step. The function looks categories up, hashes and crosses on the host;
    `DenseFeatures` and `LinearModel` read what it returns. Canned estimators call it themselves.

    Args:
        feature_columns: the model's.

    Returns:
        A function of features and labels, of batches.

    Raises:
        InvalidArgumentError: two columns have one name.

    >>> from unisono import feature_column
    >>> color = feature_column.categorical_column_with_vocabulary_list("color", ["red", "green"])
    >>> feature_column.encode([color])({"color": ["green", "blue"]})
    {'color/vocabulary': array([[ 1], [-1]], dtype=int32)}
    """
    return FeatureEncoder(checked_columns(feature_columns, "encode"))


def categories_in_step(column: CategoricalColumn, features: Features) -> tuple[jax.Array, jax.Array | None]:
    """Return the categories and weights of a batch in a step.

    Args:
        features: encoded ones; or raw ones, where they are known on the host.

    Returns:
        Integers of shape `(batch, length)`, -1 where there is none, and floats of that shape or None.
    """
    if isinstance(column, BucketizedColumn):
        return column.ids(features), None
    entries: Features = features
    if column.encoded_key not in features:
        if any(is_traced(features.get(key)) for key in column.feature_keys()):
            raise InvalidTypeError(
                f"The categories of {column.name!r} are computed on the host, before a step. "
                f"Received: {column.feature_keys()} inside a compiled step. "
                "Write dataset.map(feature_column.encode(columns)) after batch()."
            )
        entries = host_values(column, features)
    weights = None if column.weights_key is None else jnp.asarray(entries[column.weights_key])
    return jnp.asarray(entries[column.encoded_key]), weights


def weight_column_of(given: str | NumericColumn | None) -> NumericColumn | None:
    """Return the numeric column of the weights of examples, which may be given by its key."""
    if not isinstance(given, (str, NumericColumn, type(None))):
        raise InvalidTypeError(f"weight_column must be a key or a numeric column. Received: {given!r}.")
    return NumericColumn(given) if isinstance(given, str) else given


def make_dense(columns: Iterable[FeatureColumn], caller: str) -> list[DenseColumn]:
    """Return columns that are all dense, sorted by name as TensorFlow sorts them."""
    dense: list[DenseColumn] = []
    for column in columns:
        if not isinstance(column, DenseColumn):
            raise InvalidTypeError(
                f"{caller} takes dense columns. Received: the categorical column {column.name!r}. "
                "Write indicator_column(column) or embedding_column(column, dimension)."
            )
        dense.append(column)
    return sorted(dense, key=lambda column: column.name)
