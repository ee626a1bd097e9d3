"""Input functions of arrays and of pandas' data frames, as TensorFlow 1 has them in `tf.estimator.inputs`.

Source: https://www.tensorflow.org/versions/r1.15/api_docs/python/tf/estimator/inputs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._types import ArrayLike, UserValue
from unisono.data._dataset import Dataset
from unisono.estimator._docstrings import Texts

__all__ = ["numpy_input_fn", "pandas_input_fn"]


def __dir__() -> list[str]:
    return __all__


_TEXTS = Texts(
    {
        "x": "array, or dict of arrays by name; the features.",
        "y": "array, or dict of arrays by name, the labels; None for none.",
        "batch_size": "whole number; the rows in a batch of each replica.",
        "num_epochs": "whole number; how often all rows are given. None for ever. Batches reach over the "
        "end of an epoch.",
        "shuffle": "bool; whether rows come in another order in each epoch. It must be given.",
        "queue_capacity": "whole number; has no effect, because all rows are shuffled.",
        "num_threads": "whole number; has no effect.",
        "target_column": "string; has no effect.",
    },
    "A function without arguments that returns a dataset of features, or of features and labels.",
    {"InvalidArgumentError": "`shuffle` is not given, there are no arrays, or their lengths differ."},
)


@_TEXTS
def numpy_input_fn(
    x: ArrayLike | Mapping[str, ArrayLike],
    y: ArrayLike | Mapping[str, ArrayLike] | None = None,
    batch_size: int = 128,
    num_epochs: int | None = 1,
    shuffle: bool | None = None,
    queue_capacity: int = 1000,
    num_threads: int = 1,
) -> Callable[[], Dataset]:
    """Return an input_fn of arrays.

    >>> input_fn = numpy_input_fn({"x": np.arange(3)}, np.arange(3), batch_size=2, shuffle=False)
    >>> [labels.tolist() for _, labels in input_fn()]
    [[0, 1], [2]]
    """
    if not isinstance(shuffle, bool):
        raise InvalidArgumentError(
            f"shuffle must be provided and explicitly set as boolean. Received: shuffle={shuffle!r}. Pass "
            "True for training, and False for evaluation and prediction."
        )
    features = _arrays(x, "x")
    labels = None if y is None else _arrays(y, "y")
    every = features if labels is None else (features, labels)
    rows = _length(features, labels)

    def input_fn() -> Dataset:
        dataset = Dataset.from_tensor_slices(every)
        if shuffle:
            dataset = dataset.shuffle(rows)
        return dataset.repeat(num_epochs).batch(batch_size)

    return input_fn


@_TEXTS.with_texts(
    x="data frame; the features.",
    y="series or data frame with the index of `x`, the labels; None for none.",
    raises={"InvalidArgumentError": "`shuffle` is not given, there are no columns, or the indices differ."},
)
def pandas_input_fn(
    x: UserValue,
    y: UserValue = None,
    batch_size: int = 128,
    num_epochs: int | None = 1,
    shuffle: bool | None = None,
    queue_capacity: int = 1000,
    num_threads: int = 1,
    target_column: str = "target",
) -> Callable[[], Dataset]:
    """Return an input_fn of a pandas data frame: the features are its columns by name.

    >>> import pandas
    >>> table = pandas.DataFrame({"age": [20.0, 60.0]})
    >>> data = pandas_input_fn(table, pandas.Series([0, 1]), batch_size=2, shuffle=False)()
    """
    if y is not None and not np.array_equal(x.index, y.index):
        raise InvalidArgumentError(
            f"Index for x and y are mismatched. Received: {x.index!r} and {y.index!r}. Call "
            "`reset_index` on both."
        )
    labels = y
    if y is not None:
        labels = _columns(y) if hasattr(y, "columns") else np.asarray(y)
    return numpy_input_fn(_columns(x), labels, batch_size, num_epochs, shuffle, queue_capacity, num_threads)


def _columns(frame: UserValue) -> dict[str, np.ndarray]:
    """Return the columns of a data frame, with objects as strings."""
    arrays = {name: np.asarray(frame[name]) for name in frame.columns}
    return {name: array.astype(str) if array.dtype == object else array for name, array in arrays.items()}


def _arrays(given: ArrayLike | Mapping[str, ArrayLike], name: str) -> Any:
    if not isinstance(given, Mapping):
        return np.asarray(given)
    if not given:
        raise InvalidArgumentError(f"{name} cannot be empty. Received: {given!r}. Pass arrays by name.")
    return {key: np.asarray(array) for key, array in given.items()}


def _length(features: Any, labels: Any) -> int:
    """Return the number of rows of all arrays."""
    own = features if isinstance(features, dict) else {"x": features}
    others = labels if isinstance(labels, dict) else {} if labels is None else {"y": labels}
    lengths = {f"{key!r}": len(array) if array.ndim else 0 for key, array in [*own.items(), *others.items()]}
    if len(set(lengths.values())) != 1 or not next(iter(lengths.values())):
        raise InvalidArgumentError(
            "Length of tensors in x and y is mismatched: all arrays need the same number of rows, at least "
            f"one. Received: {lengths}. Give as many labels as features."
        )
    return next(iter(lengths.values()))
