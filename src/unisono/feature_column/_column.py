"""The base of feature columns: descriptions of features, by value, without variables.

Tests: tests/unit/feature_column/test_columns.py.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._types import UserValue
from unisono.preprocessing._fingerprints import on_host

#: Features by key: arrays whose first axis is the batch.
Features = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Values:
    """The categories of a batch on the host.

    Args:
        ids: integers of shape `(batch, length)`.
    """

    ids: np.ndarray
    present: np.ndarray
    weights: np.ndarray | None = None


class FeatureColumn(abc.ABC):
    """A description of what a model reads from the features of a batch."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name, and the prefix of the variables' names."""

    @abc.abstractmethod
    def feature_keys(self) -> tuple[str, ...]:
        """Return the keys of the features that the column reads."""


@dataclasses.dataclass(frozen=True)
class KeyColumn(FeatureColumn):
    """A column of one feature, whose name is the feature's key."""

    key: str

    @property
    def name(self) -> str:
        """The key."""
        return self.key

    def feature_keys(self) -> tuple[str, ...]:
        """Return the key of the feature."""
        return (self.key,)


class DenseColumn(FeatureColumn):
    """A column that gives `width` numbers for each row."""

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """How many numbers a row has."""


class CategoricalColumn(FeatureColumn):
    """A column that gives each row any number of categories, from 0 to `num_buckets` - 1."""

    @property
    @abc.abstractmethod
    def num_buckets(self) -> int:
        """How many categories there are."""

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """A text that distinguishes columns of one name, such as "vocabulary"."""

    @property
    def encoded_key(self) -> str:
        """The key of the categories in encoded features."""
        return f"{self.name}/{self.kind}"

    @property
    def weights_key(self) -> str | None:
        """The key of the categories' weights in encoded features, or None."""
        return None

    @abc.abstractmethod
    def values(self, features: Features) -> Values:
        """Return the categories of a batch, computed on the host."""


def raw_feature(features: Features, key: str) -> UserValue:
    """Return a feature."""
    if key not in features:
        raise InvalidArgumentError(
            f"Feature {key!r} must be in the features: a feature column reads it. "
            f"Received: features {sorted(features)}."
        )
    return features[key]


def raw_values(features: Features, key: str) -> np.ndarray:
    """Return a feature as an array of shape `(batch, length)` on the host.

    Raises:
        InvalidTypeError: the feature belongs to a step that is being compiled.

    >>> raw_values({"x": [1, 2]}, "x")
    array([[1],
           [2]])
    """
    array = on_host(raw_feature(features, key), f"The feature column of {key!r}")
    return array.reshape(-1) if array.ndim == 0 else array.reshape(len(array), -1)


def is_missing(values: np.ndarray) -> np.ndarray:
    """Return where an array has TensorFlow's marks of missing values: "" and -1.

    >>> is_missing(np.array([3, -1])).tolist()
    [False, True]
    """
    missing: np.ndarray = values == (b"" if values.dtype.kind == "O" else -1)
    return missing


def is_traced(value: object) -> bool:
    """Return whether a value belongs to a step that is being compiled."""
    return isinstance(value, jax.core.Tracer)


def checked_key(key: object) -> str:
    """Return a key."""
    if not isinstance(key, str):
        raise InvalidArgumentError(f"A feature column's key must be a string. Received: {key!r}.")
    return key
