"""Files of Keras' models: written atomically, also into object stores, and read from there.

Tests: tests/cluster/test_chief.py.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from unisono._errors import InvalidArgumentError
from unisono._export._files import replace_atomically
from unisono._system._object_store import StorePath, local_copy, store_path, written_locally
from unisono._types import UserValue

#: What Keras' saving functions return.
Result = TypeVar("Result")

#: What Keras writes as one file.
_FILES = (".keras", ".h5", ".hdf5", ".onnx")


def local_file(given: UserValue) -> contextlib.AbstractContextManager[UserValue]:
    """Return a context manager that yields the path itself, or a copy of what lies in an object store."""
    store = _store_path(given)
    return contextlib.nullcontext(given) if store is None else local_copy(store)


def write_whole(original: Callable[..., Result], bound: inspect.BoundArguments) -> Result:
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
