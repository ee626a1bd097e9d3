"""The state of callbacks, as far as it can be kept in a checkpoint.

Only state is restored. What a constructor was given is the program's: a program that is started again with
`EarlyStopping(patience=50)` instead of 3 continues with 50.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from unisono._errors import InvalidTypeError
from unisono._types import State
from unisono.checkpoint._json_state import encode
from unisono.step._keras_internals import CALLBACK_ATTRIBUTES, has_had_model

_LOG = logging.getLogger("unisono")

#: Attributes that Keras' own callbacks derive from their arguments whenever they run.
_DERIVED = {
    keras.callbacks.EarlyStopping: {"min_delta", "monitor_op"},
    keras.callbacks.ModelCheckpoint: {"min_delta", "monitor_op"},
    keras.callbacks.ReduceLROnPlateau: {"min_delta", "monitor_op"},
    keras.callbacks.CSVLogger: {"append_header"},
}


#: Modules of functions that compute with their arguments and do no more.
_PURE = ("math", "operator", "_operator")


@dataclasses.dataclass(frozen=True)
class CallbackBaseline:
    """A callback as the program made it.

    Args:
        attributes: those that a checkpoint can hold.
        is_new: whether it has never trained; after training, attributes differ that are not arguments.
    """

    attributes: Mapping[str, Any]
    is_new: bool

    @classmethod
    def of(cls, callback: keras.callbacks.Callback) -> CallbackBaseline:
        """Note what a callback is before `fit` begins."""
        return cls(attributes_of(callback), not has_had_model(callback))


def attributes_of(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Return the attributes of a callback that a checkpoint can hold; none if it has `get_state`.

    Returns:
        Copies of those that are numbers, strings, None and arrays, in lists, tuples, sets and dicts; others,
        such as open files, are left out.
    """
    if callable(getattr(callback, "get_state", None)):
        return {}
    attributes = {}
    for name, value in vars(callback).items():
        if name in CALLBACK_ATTRIBUTES or callable(value):
            continue
        try:
            # Only to see whether it can be kept; what is kept is encoded with the rest of the backup.
            encode(value, {}, name)
        except InvalidTypeError:
            _LOG.debug("%s.%s is not kept in checkpoints.", type(callback).__name__, name)
            continue
        attributes[name] = _copied(value)
    return attributes


def state_of(callback: keras.callbacks.Callback, made: CallbackBaseline) -> dict[str, Any]:
    """Return a callback's state: `get_state()` where it has one, else its plain attributes.

    Returns:
        The attributes now and before `fit`. Functions of modules are kept by name.
    """
    if callable(getattr(callback, "get_state", None)):
        return {"state": callback.get_state()}
    paths = {
        n: _import_path(v) for n, v in vars(callback).items() if n not in CALLBACK_ATTRIBUTES and callable(v)
    }
    return {
        "attributes": attributes_of(callback),
        # Keras' callbacks find out late which way their monitor goes, and keep `less` or `greater`.
        "functions": {name: path for name, path in paths.items() if path is not None},
        "initial": dict(made.attributes),
    }


def set_state_of(
    callback: keras.callbacks.Callback, state: Mapping[str, Any], made: CallbackBaseline
) -> list[str]:
    """Put a state from `state_of` back, and leave the arguments as the program has them.

    Args:
        state: from `state_of`; states of earlier versions do not say what was an argument.

    Returns:
        The arguments that differ from the saving program's, as text.
    """
    if "state" in state:
        callback.set_state(state["state"])
        return []
    initial, program = state.get("initial", {}), made.attributes
    derived = _derived_names(callback) if initial else set()
    arguments = _argument_names(type(callback))
    changes = []
    for name, value in state["attributes"].items():
        differs = name in initial and name in program and not _is_same(initial[name], program[name])
        # A callback that has trained before differs also in state; of that one only names of arguments count.
        is_argument = differs and (made.is_new or name.removeprefix("_") in arguments)
        # An argument that training itself has changed since is state.
        if is_argument and (name in derived or _is_same(initial[name], value)):
            changes.append(f"{name}={_short(program[name])}, in the backup {_short(initial[name])}")
        elif name not in derived and not _is_method(callback, name):
            setattr(callback, name, value)
    for name, path in state["functions"].items():
        if name not in derived and not _is_method(callback, name):
            _set_function(callback, name, path)
    return changes


def _set_function(callback: keras.callbacks.Callback, name: str, path: State) -> None:
    """Give a callback the function that a backup names.

    A backup may come from another user: it does not choose among all functions of all modules.
    """
    module, function = path if isinstance(path, (list, tuple)) and len(path) == 2 else (None, None)
    target: object = None
    if isinstance(module, str) and isinstance(function, str):
        target = getattr(sys.modules.get(module), function, None)
    if target is not None and target is vars(callback).get(name):
        return
    own = type(callback).__module__.partition(".")[0]
    is_known = module in _PURE or isinstance(target, np.ufunc) or str(module).partition(".")[0] == own
    if is_known and callable(target):
        setattr(callback, name, target)
    else:
        _LOG.warning(
            "%s.%s is what the program gave it: the backup names %s.%s, which is no function of NumPy's or "
            "of the package %s.", type(callback).__name__, name, module, function, own,
        )  # fmt: skip


def _is_method(callback: keras.callbacks.Callback, name: str) -> bool:
    """Return whether a name belongs to a method or property, which no state replaces."""
    held = getattr(type(callback), name, None)
    return callable(held) or isinstance(held, property)


def _derived_names(callback: keras.callbacks.Callback) -> set[str]:
    return set().union(*(names for kind, names in _DERIVED.items() if isinstance(callback, kind)))


def _argument_names(kind: type) -> set[str]:
    """Names of the arguments of a class' constructor and of those that it inherits."""
    # Without `object`, whose signature is `*args, **kwargs`.
    every = (vars(base)["__init__"] for base in kind.__mro__[:-1] if "__init__" in vars(base))
    return set().union(*(inspect.signature(init).parameters for init in every))


def _is_same(a: State, b: State) -> bool:
    if isinstance(a, (np.ndarray, np.generic)) or isinstance(b, (np.ndarray, np.generic)):
        # Bytes: NaN must equal itself.
        x, y = np.asarray(a), np.asarray(b)
        return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()
    # For Python 1, 1.0 and True are equal; as arguments they are not.
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_is_same(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def _short(value: State) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _import_path(value: Any) -> tuple[str, str] | None:
    """Where a function of a loaded module is found again; None for methods, lambdas and the like."""
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    # A method, a decorated or a local function of that name would be another one after a restart.
    return (module, name) if getattr(sys.modules.get(module), name, None) is value else None


def names_of(callbacks: Sequence[keras.callbacks.Callback]) -> list[str]:
    """The classes of callbacks, by which a checkpoint recognizes them."""
    return [f"{type(c).__module__}.{type(c).__qualname__}" for c in callbacks]


def _copied(value: State) -> State:
    """A copy that later changes of the callback do not reach."""
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_copied(v) for v in value)
    return np.array(value) if isinstance(value, np.ndarray) else value
