"""What a call of `fit`, `evaluate` or `predict` must have in common on all workers, as text: pure.

Nothing that a correct program may have different on each worker gets in: addresses of objects, names
that Keras counts up, seeds, folders, and a learning rate that is a variable, which all take from the
first worker. What has no configuration is described by its class and the code of its methods.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import functools
import hashlib
import inspect
import marshal
import re
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import keras
import numpy as np

from unisono._system._environ import process_environ
from unisono._types import Json, UserValue
from unisono.checkpoint._variable_paths import canonical_paths
from unisono.cluster.strategy._chief_callbacks import is_chief_only
from unisono.step._keras_internals import all_layers, compile_arguments, function_arguments
from unisono.training._fit_extension import FitExtension, flat_callbacks
from unisono.training._step_form import held_optimizers

#: Numbers and options that all workers must give alike, and data of which only the size is compared.
_OPTIONS = (
    "batch_size",
    "epochs",
    "initial_epoch",
    "steps",
    "steps_per_epoch",
    "validation_batch_size",
    "validation_steps",
    "validation_freq",
    "shuffle",
    "class_weight",
    "validation_split",
)
#: Arguments of `compile` that are compared, besides the optimizer.
_COMPILED = ("loss", "loss_weights", "metrics", "weighted_metrics")
_DATA = ("x", "y", "sample_weight", "validation_data")

#: Variables of the environment that decide which programs run. Workers that run others would wait for ever.
_SWITCHES = ("UNISONO_STEPS_TOGETHER", "UNISONO_RESIDENT_DATA")

#: Describes a value that is a part of another one.
Describe: TypeAlias = Callable[[UserValue], str]

#: Entries of configurations that may differ: initial values and the state of generators are the chief's.
_LEFT_OUT = frozenset({"name", "seed", "registered_name", "build_config", "module", "shared_object_id"})

#: Where an object lies, in the text that Python gives for it.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

#: How the code of a function without keyword-only arguments begins, as `keras.layers.Lambda` encodes it.
_CODE = ("4wAAAAAA", "4wEAAAAA", "4wIAAAAA", "4wMAAAAA", "4wQAAAAA")

#: Deeper structures are described by their class: a configuration may hold a whole model, or itself.
_DEPTH = 12

#: Characters of a text, such as a vocabulary, of which the rest is hashed.
_CHARACTERS = 2000


def call_fingerprint(model: keras.Model, arguments: Mapping[str, object]) -> dict[str, str]:
    """Return what must be equal on all workers, by name."""
    fingerprint = {name: described(arguments.get(name)) for name in _OPTIONS}
    fingerprint |= {name: size_of(arguments.get(name)) for name in _DATA}
    paths = canonical_paths(v.path for v in model.variables)
    rows = zip(paths, model.variables, strict=True)
    fingerprint["model"] = "\n".join(
        f"{path} {tuple(v.shape)} {v.dtype}{'' if v.trainable else ' not trainable'}" for path, v in rows
    )
    # What was built in another way differs above.
    fingerprint |= {"layers": layers_of(model), "optimizer": optimizer_of(getattr(model, "optimizer", None))}
    fingerprint |= {name: optimizer_of(optimizer) for name, optimizer in held_optimizers(model).items()}
    compiled = compile_arguments(model)
    # Outputs have names that Keras counts up, by which a user may give losses.
    names = {name: i for i, name in enumerate(getattr(model, "output_names", None) or ())}
    fingerprint |= {name: described(compiled.get(name), names) for name in _COMPILED}
    fingerprint["precision"] = str(getattr(getattr(model, "dtype_policy", None), "name", None))
    fingerprint |= {
        name: str(getattr(model, name)) for name in ("steps_per_execution", "run_eagerly", "jit_compile")
    }
    environ = process_environ()
    fingerprint |= {name: environ.get(name) or "not set" for name in _SWITCHES}
    given = flat_callbacks(arguments.get("callbacks"))
    fingerprint["callbacks"] = "\n".join(_text_of(c) for c in given if _decides(c))
    return fingerprint


def other_callbacks(callbacks: Sequence[keras.callbacks.Callback]) -> list[str]:
    """Return the names of callbacks that may be on the chief alone, which decides for all.

    >>> other_callbacks([keras.callbacks.LambdaCallback(), keras.callbacks.EarlyStopping()])
    ['LambdaCallback']
    """
    return [type(c).__name__ for c in callbacks if not _decides(c) and not is_chief_only(c)]


def are_within(callbacks: Sequence[Sequence[str]]) -> bool:
    """Return whether the chief has all callbacks that others have.

    >>> are_within([["Prints", "Times"], ["Times"]]), are_within([["Prints"], ["Times"]])
    (True, False)
    """
    return all(Counter(c) <= Counter(callbacks[0]) for c in callbacks)


def _decides(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback changes on each worker what is trained, or waits for the other workers."""
    if isinstance(callback, FitExtension):
        return True
    is_keras_own = type(callback).__module__.partition(".")[0] == "keras"
    return (
        is_keras_own and not is_chief_only(callback) and type(callback) is not keras.callbacks.LambdaCallback
    )


def _text_of(callback: keras.callbacks.Callback) -> str:
    common = callback._common if isinstance(callback, FitExtension) else ""
    return f"{type(callback).__name__} {common}".strip()


def size_of(data: object) -> str:
    """Return the type of some input, and what is known before the first batch: shapes, or how many."""
    name = getattr(type(data), "described_as", type(data).__name__)
    return f"{name} {' '.join(map(_size_of_leaf, jax.tree.leaves(data)))}"


def _size_of_leaf(leaf: UserValue) -> str:
    if hasattr(leaf, "shape"):
        return str(tuple(leaf.shape))
    try:
        return f"{leaf.num_batches if hasattr(leaf, 'num_batches') else len(leaf)} batches"
    except (TypeError, NotImplementedError):  # from generators and the like
        return "of unknown size"


def layers_of(model: keras.Model) -> str:
    """Return a line for each layer of a model, and for each connection of a functional one."""
    # Containers first; their own configuration holds the others'.
    lines = []
    for layer in all_layers(model):
        is_container = isinstance(layer, keras.Model)
        lines.append(_class_of(layer) if is_container else described(layer))
        lines += _connections(layer) if is_container else []
    return "\n".join(lines)


def _connections(model: keras.Model) -> list[str]:
    """Return how the layers of a functional model are connected, by their numbers."""
    if not hasattr(model, "operations") or isinstance(model, keras.Sequential):
        return []
    try:
        layers = model.get_config()["layers"]
        numbers = {layer["name"]: i for i, layer in enumerate(layers)}
        return [f"{i} from {described(x['inbound_nodes'], numbers)}" for i, x in enumerate(layers)]
    except Exception:  # a user's `get_config` may raise anything
        return []


def optimizer_of(optimizer: keras.Optimizer | None) -> str:
    """Return the class of an optimizer and its arguments, without a learning rate that it may change.

    >>> optimizer_of(keras.optimizers.SGD(0.1)) == optimizer_of(keras.optimizers.SGD(0.2))
    True
    """
    config = _config_of(optimizer)
    return (
        described(optimizer) if config is None else f"{_class_of(optimizer)} {_dict(_without_rate(config))}"
    )


def _without_rate(config: Json) -> Json:
    if not isinstance(config, Mapping):
        return config
    # A schedule is an argument, and stays.
    kept = {k: v for k, v in config.items() if k != "learning_rate" or isinstance(v, Mapping)}
    return {k: _without_rate(v) for k, v in kept.items()}


def described(value: object, names: Mapping[str, int] | None = None, depth: int = _DEPTH) -> str:
    """Return a text that is equal for values that have the same effect.

    Args:
        names: of layers, which stand for numbers.
        depth: how many structures inside each other are looked into.

    >>> described([keras.losses.Huber(), lambda x: x]) == described([keras.losses.Huber(), lambda x: x])
    True
    """
    text = _described(value, names or {}, depth)
    if len(text) <= _CHARACTERS:
        return text
    return f"{text[:_CHARACTERS]} … {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _described(value: object, names: Mapping[str, int], depth: int) -> str:
    if isinstance(value, enum.Enum):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, complex, bytes)):
        return repr(value)
    if isinstance(value, str):
        # Of a path the folders may be each worker's own.
        return f"#{names[value]}" if value in names else _text(value)
    if depth == 0:
        return _qualname(value)
    inner = functools.partial(_described, names=names, depth=depth - 1)
    if isinstance(value, Mapping):
        return _dict(value, inner, names)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(inner, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(inner, value)))}}}"
    if isinstance(value, (np.ndarray, np.generic, jax.Array, keras.Variable)):
        return _array(value)
    if isinstance(value, functools.partial):
        return f"partial {inner([value.func, value.args, value.keywords])}"
    function = _function(value)
    if function is not None:
        return f"{function.__qualname__} {_code_hash([function.__code__])}"
    config = None if isinstance(value, type) else _config_of(value)
    return _class_of(value) if config is None else f"{_class_of(value)} {_dict(config, inner)}"


def _text(value: str) -> str:
    """Return a text without addresses, and without folders where it is a path."""
    if value.startswith(_CODE):
        # Keras encodes lambdas together with the path of their file.
        with contextlib.suppress(ValueError, EOFError, TypeError):
            code = marshal.loads(base64.b64decode(value))
            return f"lambda {_code_hash([code])}" if isinstance(code, types.CodeType) else repr(value)
    return _ADDRESS.sub("", repr(value.replace("\\", "/").rpartition("/")[2]))


def _dict(
    value: Mapping[UserValue, object],
    inner: Describe | None = None,
    names: Mapping[str, int] | None = None,
) -> str:
    inner = inner or functools.partial(_described, names={}, depth=_DEPTH)
    keys = {k: f"#{names[k]}" if names and k in names else _ADDRESS.sub("", str(k)) for k in value}
    items = sorted((keys[k], inner(v)) for k, v in value.items() if k not in _LEFT_OUT)
    return f"{{{', '.join(f'{k}: {v}' for k, v in items)}}}"


def _array(value: np.ndarray | np.generic | jax.Array | keras.Variable) -> str:
    text = f"{tuple(value.shape)} {value.dtype}"
    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.hasobject:
        return text
    return f"{text} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]}"


def _config_of(value: object) -> Mapping[str, UserValue] | None:
    """Return the configuration of Keras' objects and of users' that have one."""
    if not hasattr(value, "get_config"):
        return None
    try:
        config = value.get_config()
    except Exception:  # a user's may raise anything, and Keras' own rejects classes without one
        return None
    # Keras' own losses and metrics keep arguments of their function here, and out of the configuration.
    kwargs = function_arguments(value)
    config = {**config, "function arguments": kwargs} if kwargs and isinstance(config, Mapping) else config
    return config if isinstance(config, Mapping) else None


def _class_of(value: object) -> str:
    """Return the name of a class, and for a user's the code of its methods."""
    cls = value if isinstance(value, type) else type(value)
    functions = [f for c in cls.__mro__ if not _is_of_library(c) for f in _functions_of(c)]
    return f"{_qualname(value)} {_code_hash(functions)}" if functions else _qualname(value)


def _qualname(value: object) -> str:
    cls = value if isinstance(value, type) else type(value)
    return str(cls.__qualname__)


def _is_of_library(cls: type) -> bool:
    libraries = ("keras", "builtins", "jax", "jaxlib", "numpy", "unisono", "abc")
    return cls.__module__.partition(".")[0] in libraries


def _functions_of(cls: type) -> Iterator[types.CodeType]:
    for _, value in sorted(vars(cls).items()):
        function = _function(value)
        if function is not None:
            yield function.__code__


def _function(value: UserValue) -> types.FunctionType | None:
    """Return the function in a method, a wrapper or itself."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if not isinstance(value, (type, types.FunctionType)) and hasattr(value, "__wrapped__"):
        value = inspect.unwrap(value)
    return value if isinstance(value, types.FunctionType) else None


def _code_hash(codes: list[types.CodeType]) -> str:
    state = hashlib.sha256()
    for code in codes:
        state.update(_code(code).encode())
    return state.hexdigest()[:16]


def _code(constant: object) -> str:
    """Return a constant of a program, without the file and the lines of code."""
    if isinstance(constant, types.CodeType):
        consts = ",".join(map(_code, constant.co_consts))
        return f"{constant.co_code.hex()} {constant.co_names} {constant.co_freevars} ({consts})"
    if isinstance(constant, frozenset):
        # Each process hashes texts with a seed of its own, and orders a set of them by that.
        return str(sorted(map(repr, constant)))
    return f"({','.join(map(_code, constant))})" if isinstance(constant, tuple) else repr(constant)
