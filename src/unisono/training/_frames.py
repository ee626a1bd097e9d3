"""Frames and series of polars as arrays, as Keras reads tables of pandas.

Tests: tests/virtual/training/test_keras_data.py.
"""

from __future__ import annotations

import jax
import numpy as np

from unisono._errors import InvalidTypeError
from unisono._types import UserValue
from unisono.data._batches import is_of_class

#: The arguments of Keras' methods that may hold frames.
_DATA = ("x", "y", "sample_weight", "validation_data")


def arrays_of_frames(arguments: dict[str, UserValue]) -> dict[str, UserValue]:
    """Return the arguments of a call with the arrays of frames in their place.

    Args:
        arguments: by name.

    Raises:
        InvalidTypeError: for a lazy frame, whose rows were not read.
    """
    given = {key: arguments[key] for key in _DATA if arguments.get(key) is not None}
    return {**arguments, **{key: jax.tree.map(_array_of, data) for key, data in given.items()}}


def _array_of(leaf: UserValue) -> UserValue:
    if is_of_class(leaf, "polars.dataframe.frame.DataFrame"):
        return leaf.to_numpy()
    if is_of_class(leaf, "polars.series.series.Series"):
        # As Keras does with a series of pandas.
        return np.expand_dims(leaf.to_numpy(), -1)
    if is_of_class(leaf, "polars.lazyframe.frame.LazyFrame"):
        raise InvalidTypeError(
            "Data must be in memory, or be read in batches. Received: a LazyFrame of polars. Write "
            "`frame.collect()`."
        )
    return leaf
