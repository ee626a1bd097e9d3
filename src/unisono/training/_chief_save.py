"""Files of a model that several workers train: written once, and atomically.

Tests: tests/cluster/test_chief.py.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import keras

from unisono._context import current
from unisono._features import load
from unisono._types import KerasWrap, UserValue
from unisono.step._layout import gathered_for_file
from unisono.training._binding import holder_of

#: What Keras' saving functions return.
Result = TypeVar("Result")

#: Calls one of them so that the file is whole.
_Writer: TypeAlias = Callable[[Callable[..., Result], inspect.BoundArguments], Result]


def wraps() -> list[KerasWrap]:
    """Return what is wrapped of Keras' saving."""
    saving = keras.saving
    functions = [(saving, "save_model"), (keras.models, "save_model"), (saving, "save_weights")]
    methods = [(keras.Model, name) for name in ("save", "save_weights", "export")]
    written = [(owner, name, written_once) for owner, name in (*methods, *functions)]
    read = [(saving, "load_model", model_from_store), (keras.models, "load_model", model_from_store)]
    weights = [(owner, "load_weights", weights_from_store) for owner in (keras.Model, saving)]
    return [*written, *read, *weights]


def model_from_store(
    original: Callable[..., Result], filepath: UserValue, *args: UserValue, **kwargs: UserValue
) -> Result:
    """Call Keras' `load_model` with a copy of what lies in an object store."""
    if not _may_be_address(filepath):
        return original(filepath, *args, **kwargs)
    with load("copy of a stored model")(filepath) as path:
        return original(path, *args, **kwargs)


def weights_from_store(
    original: Callable[..., Result],
    model: keras.Model,
    filepath: UserValue,
    *args: UserValue,
    **kwargs: UserValue,
) -> Result:
    """Call Keras' `load_weights` with a copy of what lies in an object store."""
    return model_from_store(functools.partial(original, model), filepath, *args, **kwargs)


def written_once(
    original: Callable[..., Result], model: keras.Model, *args: object, **kwargs: object
) -> Result | None:
    """Call Keras' `save`, `save_weights` or `export` on the first of several workers."""
    strategy = holder_of(model)
    is_alone = strategy is None or strategy.process_group.size == 1
    if is_alone and not _may_be_address(args[0] if args else kwargs.get("filepath")):
        return original(model, *args, **kwargs)
    write: _Writer[Result] = load("atomic writing of a model")
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    bound.apply_defaults()
    if strategy is None or is_alone:
        return write(original, bound)
    path = str(bound.arguments["filepath"])
    context = current()
    # In `fit` it may be the first worker's callback alone that saves, after all have gathered.
    if context is None or not context.is_of_method:
        variables = getattr(getattr(model, "optimizer", None), "variables", ())
        strategy.gather_state([*model.variables, *gathered_for_file(variables)])
    result = write(original, bound) if strategy.is_chief else None
    strategy.process_group.share_file(path)
    return result


def _may_be_address(filepath: UserValue) -> bool:
    """Return whether a path looks like that of an object in a store.

    >>> _may_be_address("s3://bucket/m.keras"), _may_be_address("m.keras"), _may_be_address("hf://user/model")
    (True, False, False)
    """
    # Keras has its own way to a repository of models.
    text = str(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
    return ":/" in text and not text.startswith("hf://")
