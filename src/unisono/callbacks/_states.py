"""The state of callbacks, as far as it can be kept in a checkpoint."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from unisono._errors import CheckpointMismatchError, InvalidTypeError
from unisono.checkpoint._facts import encode

_LOG = logging.getLogger("unisono")

#: What Keras sets on every callback, and what belongs to the process.
_NOT_STATE = {"_model", "model", "params"}


def state_of(callback: Any) -> dict[str, Any]:
    """Return what a callback remembers: `get_state()` where it has one, else its plain attributes.

    Args:
        callback: such as `EarlyStopping`, with `wait`, `best` and `best_weights`.

    Returns:
        Attributes that are numbers, strings, None and arrays, in lists, tuples, sets and dicts; others,
        such as open files, are left out. Functions of modules are kept by name.
    """
    if callable(getattr(callback, "get_state", None)):
        return {"state": callback.get_state()}
    found, functions = {}, {}
    for name, value in vars(callback).items():
        if name in _NOT_STATE:
            continue
        if callable(value):
            # Keras' callbacks find out late which way their monitor goes, and keep `less` or `greater`.
            path = _import_path(value)
            if path is not None:
                functions[name] = path
            continue
        try:
            encode(value, {}, name)
        except InvalidTypeError:
            _LOG.debug("%s.%s is not kept in checkpoints.", type(callback).__name__, name)
            continue
        found[name] = _copied(value)
    return {"attributes": found, "functions": functions}


def set_state_of(callback: Any, state: dict[str, Any]) -> None:
    """Put a state from `state_of` back."""
    if "state" in state:
        callback.set_state(state["state"])
        return
    for name, value in state["attributes"].items():
        setattr(callback, name, value)
    for name, (module, function) in state["functions"].items():
        setattr(callback, name, getattr(sys.modules[module], function))


def _import_path(value: Any) -> tuple[str, str] | None:
    """Where a function of a loaded module is found again; None for methods, lambdas and the like."""
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    return (module, name) if getattr(sys.modules.get(module), name, None) is value else None


def names_of(callbacks: Sequence[Any]) -> list[str]:
    """The classes of callbacks, by which a checkpoint recognizes them."""
    return [f"{type(c).__module__}.{type(c).__qualname__}" for c in callbacks]


def check_same(saved: Sequence[str], found: Sequence[str]) -> None:
    """Raise when the callbacks are others than those whose state was saved.

    Raises:
        CheckpointMismatchError: it names the first difference.
    """
    for i in range(max(len(saved), len(found))):
        a, b = (names[i] if i < len(names) else "none" for names in (saved, found))
        if a != b:
            raise CheckpointMismatchError(
                "The callbacks must be those whose state was saved, in the same order. Received: "
                f"{b} at position {i}, where the checkpoint has {a}. Pass the same callbacks, or begin anew "
                "in another directory."
            )


def _copied(value: Any) -> Any:
    """A copy that later changes of the callback do not reach."""
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_copied(v) for v in value)
    return np.array(value) if isinstance(value, np.ndarray) else value
