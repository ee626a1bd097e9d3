"""Files of a model that several workers train: written once, and whole or not at all."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unisono._export._files import replace_atomically
from unisono.training._binding import holder_of

#: What Keras writes as one file.
_FILES = (".keras", ".h5", ".hdf5", ".onnx")


def written_once(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call Keras' `save`, `save_weights` or `export`, methods or functions, on the first of several workers.

    Args:
        original: Keras' own.
        model: what is written.
        args: of the call.
        kwargs: likewise.
    """
    strategy = holder_of(model)
    if strategy is None or not strategy.mesh.is_spread:
        return original(model, *args, **kwargs)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    bound.apply_defaults()
    path = str(bound.arguments["filepath"])
    result = _write_whole(original, bound) if strategy.is_chief else None
    strategy.share_file(path)
    return result


def _write_whole(original: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
    """Write to a place beside the path, and rename it at the end.

    Other workers may look at the path at any moment, and so may the next start after a crash.
    """
    place = _place(bound.arguments)
    if place is None:
        return original(*bound.args, **bound.kwargs)
    path, marker = place
    with replace_atomically(path, marker) as aside:
        bound.arguments["filepath"] = str(aside)
        return original(*bound.args, **bound.kwargs)


def _place(arguments: Mapping[str, Any]) -> tuple[Path, str | None] | None:
    """The path, and what marks a directory that may be replaced; None for what cannot be renamed.

    >>> _place({"filepath": "m.keras"}), _place({"filepath": "hf://m.keras"})
    ((PosixPath('m.keras'), None), None)
    """
    given = arguments["filepath"]
    if not isinstance(given, (str, os.PathLike)) or "://" in str(given):
        return None
    path = Path(given)
    # Keras asks whether to overwrite, and several files name each other.
    if (arguments.get("overwrite") is False and path.exists()) or arguments.get("max_shard_size"):
        return None
    if arguments.get("format") == "tf_saved_model":
        return path, "saved_model.pb"
    if arguments.get("zipped") is False:
        return path, "config.json"
    return (path, None) if path.suffix in _FILES else None
