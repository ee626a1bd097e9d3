"""Names that tf.data has under `experimental`: functions for `Dataset.apply`, and aliases.

>>> from unisono.data import Dataset
>>> [int(x) for x in Dataset.range(9).apply(take_while(lambda x: x < 2))]
[0, 1]

Tests: tests/unit/data/test_dataset_further.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from unisono.data._dataset import Dataset
from unisono.data._iterator import DistributedIterator, OptionalBatch
from unisono.data._pipeline._cardinality import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    SHARD_HINT,
    UNKNOWN_CARDINALITY,
)
from unisono.data._pipeline._structure import Element
from unisono.data._sharding import AutoShardPolicy, DistributeOptions

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "SHARD_HINT",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "Counter",
    "DistributeOptions",
    "RandomDataset",
    "assert_cardinality",
    "bucket_by_sequence_length",
    "cardinality",
    "choose_from_datasets",
    "enumerate_dataset",
    "from_list",
    "get_next_as_optional",
    "get_single_element",
    "group_by_window",
    "ignore_errors",
    "load",
    "map_and_batch",
    "parallel_interleave",
    "prefetch_to_device",
    "rejection_resample",
    "sample_from_datasets",
    "save",
    "scan",
    "shuffle_and_repeat",
    "snapshot",
    "take_while",
    "unbatch",
    "unique",
]


def __dir__() -> list[str]:
    return __all__


P = ParamSpec("P")
Result = TypeVar("Result")


def _function(method: Callable[P, Result]) -> Callable[P, Result]:
    """Return a method of a class as a function."""

    @functools.wraps(method)
    def function(*args: P.args, **kwargs: P.kwargs) -> Result:
        return method(*args, **kwargs)

    return function


Counter = _function(Dataset.counter)
RandomDataset = _function(Dataset.random)
choose_from_datasets = _function(Dataset.choose_from_datasets)
# A list of elements is a random-access source.
from_list = _function(Dataset.from_source)
load = _function(Dataset.load)
sample_from_datasets = _function(Dataset.sample_from_datasets)


def cardinality(dataset: Dataset) -> int:
    """Return the number of elements; see `Dataset.cardinality`.

    Args:
        dataset: The data set.

    >>> from unisono.data import Dataset
    >>> int(cardinality(Dataset.range(3)))
    3
    """
    return dataset.cardinality()


def save(dataset: Dataset, path: str, **options: Any) -> None:
    """Write all elements into a directory; see `Dataset.save`.

    Args:
        dataset: The data set.
        path: The directory.
        **options: The options of `Dataset.save`.

    >>> import tempfile
    >>> from unisono.data import Dataset
    >>> save(Dataset.range(3), tempfile.mkdtemp() + "/numbers")
    """
    dataset.save(path, **options)


def get_single_element(dataset: Dataset) -> Element:
    """Return the only element; see `Dataset.get_single_element`.

    Args:
        dataset: A data set of one element.

    >>> from unisono.data import Dataset
    >>> int(get_single_element(Dataset.range(1)))
    0
    """
    return dataset.get_single_element()


# Made from the methods, so that arguments and results cannot differ between the two ways to write a step.
def _applying(name: str) -> Callable[..., Callable[[Dataset], Dataset]]:
    """Return the function for `apply` that calls a method of `Dataset`."""
    method = getattr(Dataset, name)

    def transformation(*args: Any, **kwargs: Any) -> Callable[[Dataset], Dataset]:
        def applied(dataset: Dataset) -> Dataset:
            result: Dataset = method(dataset, *args, **kwargs)
            return result

        return applied

    transformation.__name__ = transformation.__qualname__ = name
    transformation.__doc__ = f"""Return a function for `Dataset.apply` that does what `Dataset.{name}` does.

    Args:
        *args: Positional arguments of `Dataset.{name}`.
        **kwargs: Keyword arguments of `Dataset.{name}`.
    """
    return transformation


# In tf.data these are functions of arguments that return a function for `apply`.
assert_cardinality = _applying("assert_cardinality")
bucket_by_sequence_length = _applying("bucket_by_sequence_length")
enumerate_dataset = _applying("enumerate")
group_by_window = _applying("group_by_window")
ignore_errors = _applying("ignore_errors")
parallel_interleave = _applying("interleave")
rejection_resample = _applying("rejection_resample")
scan = _applying("scan")
snapshot = _applying("snapshot")
take_while = _applying("take_while")
unbatch = _applying("unbatch")
unique = _applying("unique")


def map_and_batch(
    map_func: Callable[..., Any],
    batch_size: int,
    num_parallel_batches: int | None = None,
    drop_remainder: bool = False,
    num_parallel_calls: int | None = None,
) -> Callable[[Dataset], Dataset]:
    """Return a function for `Dataset.apply` that maps and then batches.

    Args:
        map_func: As in `Dataset.map`.
        batch_size: As in `Dataset.batch`.
        num_parallel_batches: Accepted for compatibility.
        drop_remainder: As in `Dataset.batch`.
        num_parallel_calls: As in `Dataset.map`.

    >>> [x.tolist() for x in Dataset.range(3).apply(map_and_batch(lambda x: 2 * x, 2))]
    [[0, 2], [4]]
    """
    return lambda dataset: dataset.map(map_func, num_parallel_calls).batch(batch_size, drop_remainder)


def shuffle_and_repeat(
    buffer_size: int, count: int | None = None, seed: int | None = None
) -> Callable[[Dataset], Dataset]:
    """Return a function for `Dataset.apply` that shuffles and then repeats.

    Args:
        buffer_size: As in `Dataset.shuffle`.
        count: As in `Dataset.repeat`.
        seed: As in `Dataset.shuffle`.

    >>> from unisono.data import Dataset
    >>> len(list(Dataset.range(3).apply(shuffle_and_repeat(3, count=2, seed=0))))
    6
    """
    return lambda dataset: dataset.shuffle(buffer_size, seed).repeat(count)


def prefetch_to_device(device: object, buffer_size: int | None = None) -> Callable[[Dataset], Dataset]:
    """Return a function for `Dataset.apply` that reads ahead; the strategy puts batches onto its devices.

    Args:
        device: Accepted for compatibility.
        buffer_size: As in `Dataset.prefetch`.

    >>> from unisono.data import Dataset
    >>> len(list(Dataset.range(3).apply(prefetch_to_device("/gpu:0"))))
    3
    """
    return lambda dataset: dataset.prefetch(buffer_size)


def get_next_as_optional(iterator: DistributedIterator) -> OptionalBatch:
    """Return the next batch of a distributed iterator, if there is one.

    Args:
        iterator: A `unisono.DistributedIterator`.

    >>> import unisono
    >>> strategy = unisono.MirroredStrategy(["cpu:0"])
    >>> iterator = iter(strategy.distribute_dataset(unisono.data.Dataset.range(2).batch(2)))
    >>> get_next_as_optional(iterator).has_value(), get_next_as_optional(iterator).has_value()
    (True, False)
    """
    return iterator.get_next_as_optional()
