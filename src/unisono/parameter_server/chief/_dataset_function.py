"""Functions that make the workers' datasets, as bytes.

Tests: tests/virtual/test_coordinator.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from unisono._errors import InvalidTypeError
from unisono._system._pickling import pickle_by_value
from unisono.data._sharding import DatasetCreator, InputContext
from unisono.step.functions._function import Function

if TYPE_CHECKING:
    from unisono.data._dataset import Dataset

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def dataset_maker(dataset: object, gives_context: bool = False) -> Callable[[InputContext], Any]:
    """Return what makes a dataset, given an `InputContext`.

    Args:
        dataset: a function without arguments or of an `InputContext`, an object that can be called, or a
            dataset.
        gives_context: whether a function that may be called without arguments gets the context, too.

    Raises:
        InvalidTypeError: it is neither.
    """
    if isinstance(dataset, DatasetCreator):
        dataset, gives_context = dataset.dataset_fn, True
    if isinstance(dataset, Function):
        dataset = dataset.python_function
    if callable(dataset):
        return dataset if _takes_context(dataset, gives_context) else lambda context: dataset()
    # Imported where it is used: a chief without datasets does without Grain.
    from unisono.data._dataset import Dataset

    if isinstance(dataset, Dataset):
        return functools.partial(_in_own_order, dataset)
    if isinstance(dataset, Iterable):
        return lambda context: dataset
    raise InvalidTypeError(
        "A per-worker dataset is made by a function, or is an iterable of batches. "
        f"Received: {type(dataset).__name__}. Write `create_per_worker_dataset(lambda: dataset)`."
    )


def pickled(make: Callable[[InputContext], Any]) -> bytes:
    """Return a function as bytes, by `cloudpickle`.

    Raises:
        InvalidTypeError: it cannot be pickled.
    """
    try:
        return pickle_by_value(make)
    except Exception as error:
        raise InvalidTypeError(
            "What makes a per-worker dataset must be pickled to reach the workers. "
            f"Received: {make!r}, which cannot be ({type(error).__name__}: {error}). Open files and the "
            "like inside of the function."
        ) from error


def _in_own_order(dataset: Dataset, context: InputContext) -> Dataset:
    """Return a dataset with other orders on each worker, the same whenever that worker is started."""
    from unisono.data._rewrite import shuffle_seeds, with_common_seed

    drawn = shuffle_seeds(dataset, drawn=True)
    worker = context.input_pipeline_id
    return with_common_seed(dataset, (drawn[0] + (worker << 32)) % 2**64) if drawn and worker else dataset


def _takes_context(function: Callable[..., Any], also_optional: bool) -> bool:
    """Return whether a function has a positional parameter: without a default, or any."""
    return any(
        (p.kind in _POSITIONAL and (also_optional or p.default is p.empty))
        or (p.kind is p.VAR_POSITIONAL and also_optional)
        for p in inspect.signature(function).parameters.values()
    )
