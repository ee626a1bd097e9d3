"""Functions that make the workers' datasets, as bytes.

Tests: tests/virtual/test_coordinator.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from unisono._errors import InvalidTypeError
from unisono._types import UserValue
from unisono.data._sharding import InputContext
from unisono.step.functions._function import Function


def dataset_function(dataset: UserValue) -> bytes:
    """Return a function of an `InputContext` that makes a dataset, pickled by `cloudpickle`.

    Args:
        dataset: a function without arguments or of an `InputContext`, or a dataset.

    Raises:
        InvalidTypeError: it is neither, or cannot be pickled.
    """
    import cloudpickle

    if isinstance(dataset, Function):
        dataset = dataset.python_function
    if not callable(dataset) and not isinstance(dataset, Iterable):
        raise InvalidTypeError(
            "A per-worker dataset is made by a function, or is an iterable of batches. "
            f"Received: {type(dataset).__name__}. Write `create_per_worker_dataset(lambda: dataset)`."
        )
    try:
        return bytes(cloudpickle.dumps(_made_by(dataset)))
    except Exception as error:
        raise InvalidTypeError(
            "What makes a per-worker dataset must be pickled to reach the workers. "
            f"Received: {dataset!r}, which cannot be ({type(error).__name__}: {error}). Open files and the "
            "like inside of the function."
        ) from error


def _made_by(dataset: Any) -> Callable[[InputContext], Any]:
    if not callable(dataset):
        return lambda context: dataset
    return dataset if _takes_context(dataset) else lambda context: dataset()


def _takes_context(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)
