"""Files of a model that several workers train: written once, and atomically.

Tests: tests/cluster/test_chief.py.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import keras

from unisono._context import current
from unisono._export._files import replace_atomically
from unisono._types import KerasWrap, UserValue
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
    return [(owner, name, written_once) for owner, name in (*methods, *functions)]


def written_once(
    original: Callable[..., Result], model: keras.Model, *args: UserValue, **kwargs: UserValue
) -> Result | None:
    """Call Keras' `save`, `save_weights` or `export`, methods or functions, on the first of several workers.

    Args:
        original: Keras' own.
        model: what is written.
        args: of the call.
        kwargs: likewise.
    """
    strategy = holder_of(model)
    if strategy is None or strategy.process_group.size == 1:
        return original(model, *args, **kwargs)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    bound.apply_defaults()
    path = str(bound.arguments["filepath"])
    context = current()
    # In `fit` it may be the first worker's callback alone that saves, after all have gathered.
    if context is None or not context.is_of_method:
        strategy.gather_state(getattr(getattr(model, "optimizer", None), "variables", ()))
    result = _write_whole(original, bound) if strategy.is_chief else None
    strategy.process_group.share_file(path)
    return result


def _write_whole(original: Callable[..., Result], bound: inspect.BoundArguments) -> Result:
    """Write to a place beside the path, and rename it at the end.

    Other workers may read the path at any moment, and so may the program after a restart.
    """
    place = _place(bound.arguments)
    if place is None:
        return original(*bound.args, **bound.kwargs)
    path, marker = place
    with replace_atomically(path, marker) as aside:
        bound.arguments["filepath"] = str(aside)
        return original(*bound.args, **bound.kwargs)


def _place(arguments: Mapping[str, UserValue]) -> tuple[Path, str | None] | None:
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
    if arguments.get("format") == "tf_saved_model":
        return path, "saved_model.pb"
    if arguments.get("zipped") is False:
        return path, "config.json"
    return (path, None) if path.suffix in _FILES else None
