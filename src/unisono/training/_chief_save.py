"""Files of a model that several workers train: written once, and atomically.

Tests: tests/cluster/test_chief.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import keras

from unisono._context import current
from unisono._errors import InvalidArgumentError
from unisono._export._files import replace_atomically
from unisono._system._object_store import StorePath, local_copy, store_path, written_locally
from unisono._types import KerasWrap, UserValue
from unisono.step._layout import gathered_for_file
from unisono.training._binding import holder_of

#: What Keras' saving functions return.
Result = TypeVar("Result")

#: What Keras writes as one file.
_FILES = (".keras", ".h5", ".hdf5", ".onnx")


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
    store = _store_path(filepath)
    with contextlib.nullcontext(filepath) if store is None else local_copy(store) as path:
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
    if is_alone and _store_path(args[0] if args else kwargs.get("filepath")) is None:
        return original(model, *args, **kwargs)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    bound.apply_defaults()
    if strategy is None or is_alone:
        return _write_whole(original, bound)
    path = str(bound.arguments["filepath"])
    context = current()
    # In `fit` it may be the first worker's callback alone that saves, after all have gathered.
    if context is None or not context.is_of_method:
        variables = getattr(getattr(model, "optimizer", None), "variables", ())
        strategy.gather_state([*model.variables, *gathered_for_file(variables)])
    result = _write_whole(original, bound) if strategy.is_chief else None
    strategy.process_group.share_file(path)
    return result


def _write_whole(original: Callable[..., Result], bound: inspect.BoundArguments) -> Result:
    """Write to a place beside the path, and rename it at the end.

    Other workers may read the path at any moment, and so may the program after a restart.
    """
    store = _store_path(bound.arguments["filepath"])
    if store is not None:
        if bound.arguments.get("overwrite") is False and store.exists():
            raise InvalidArgumentError(
                f"With overwrite=False a model needs a new path. Received: {store}, which exists. Pass "
                "another one."
            )
        writing = written_locally(store, _marker(bound.arguments))
    elif (place := _place(bound.arguments)) is not None:
        writing = replace_atomically(*place)
    else:
        return original(*bound.args, **bound.kwargs)
    with writing as aside:
        bound.arguments["filepath"] = str(aside)
        return original(*bound.args, **bound.kwargs)


def _place(arguments: Mapping[str, object]) -> tuple[Path, str | None] | None:
    """Return the path, and what marks a directory that may be replaced; None for what cannot be renamed.

    >>> _place({"filepath": "m.keras"}), _place({"filepath": "hf://m.keras"})
    ((PosixPath('m.keras'), None), None)
    """
    given = arguments["filepath"]
    if not isinstance(given, (str, os.PathLike)) or "://" in str(given):
        return None
    path = Path(given)
    # Keras asks the user before it overwrites; a checkpoint of several files names each of them within.
    if (arguments.get("overwrite") is False and path.exists()) or arguments.get("max_shard_size"):
        return None
    marker = _marker(arguments)
    return (path, marker) if marker or path.suffix in _FILES else None


def _marker(arguments: Mapping[str, UserValue]) -> str | None:
    """Return the file that a directory holds if it is a model; None for what Keras writes as a file."""
    if arguments.get("format") == "tf_saved_model":
        return "saved_model.pb"
    return "config.json" if arguments.get("zipped") is False else None


def _store_path(given: UserValue) -> StorePath | None:
    """Return the path of what Keras does not reach by itself.

    >>> _store_path("hf://user/model") is None
    True
    """
    # Keras has its own way to a repository of models.
    is_path = isinstance(given, (str, os.PathLike)) and not str(given).startswith("hf://")
    return store_path(given) if is_path else None
