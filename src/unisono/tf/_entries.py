"""What a name below `tf` is here: the kinds of entries of the table of names.

Tests: tests/unit/tf/test_module.py.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class At:
    """The name is an object of another module.

    Args:
        path: where it is, such as `"keras.Model"`.
        note: what is different, for the page on migrating; "" for nothing.

    >>> At("math.pi").load()
    3.141592653589793
    """

    path: str
    note: str = ""

    def load(self) -> Any:
        """Return the object."""
        return object_at(self.path)


#: The package of what takes more than another name.
ADAPTERS = "unisono.tf.adapters."


def own(path: str, note: str = "") -> At:
    """Return the entry of an object of `unisono.tf.adapters`.

    >>> own("_random.normal").path
    'unisono.tf.adapters._random.normal'
    """
    return At(f"{ADAPTERS}{path}", note)


@dataclasses.dataclass(frozen=True)
class Operator:
    """The name is a function of another module, whose arguments have TensorFlow's names.

    Args:
        path: where the function is.
        names: from TensorFlow's names of arguments to those of the function, for all that differ.
        order: TensorFlow's order of arguments, by the function's names, where it differs.
        defaults: of arguments, where TensorFlow has others.
        tensors: how many of the first arguments are tensors, which may be lists of numbers.
        note: what is different; "" for nothing.

    >>> Operator("operator.add").load()(1, 2, name="sum")
    3
    """

    path: str
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    order: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tensors: int = 1
    note: str = ""

    def load(self) -> Callable[..., Any]:
        """Return the function."""
        function = object_at(self.path)
        every = inspect.signature(function).parameters.values()
        parameters = [p.name for p in every if p.kind is p.POSITIONAL_OR_KEYWORD]
        takes_any_number = any(p.kind is p.VAR_POSITIONAL for p in every)
        tensors = {*_TENSORS, *parameters[: self.tensors]}

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            # TensorFlow names the operations of a graph; here hooks of an Estimator ask for them.
            name = kwargs.pop("name", None)
            if not takes_any_number and len(args) > len(parameters) and isinstance(args[-1], str):
                *args, name = args  # type: ignore[assignment]  # the last argument of TensorFlow's functions
            named = {self.names.get(key, key): device_dtype(value) for key, value in kwargs.items()}
            named = {k: _as_array(v) if k in tensors else v for k, v in named.items()}
            # Lists may be tensors in TensorFlow; JAX asks for arrays.
            given = [_as_array(a) if i < self.tensors else device_dtype(a) for i, a in enumerate(args)]
            if self.order:
                named |= dict(zip(self.order, given, strict=False))
                given = []
            if self.path.startswith("keras.") and any(map(_has_strings, (*given, *named.values()))):
                # Strings, of which NumPy has the operations of shapes, in the same order of arguments.
                bound = inspect.signature(function).bind(*given, **named)
                return getattr(np, function.__name__)(*bound.args, **bound.kwargs)
            return _named(function(*given, **{**self.defaults, **named}), name)

        return call


def own_operator(path: str, **options: Any) -> Operator:
    """Return the entry of a function of `unisono.tf.adapters` without TensorFlow's argument `name`.

    Args:
        path: where it is below that package.
        **options: others of `Operator`; the function makes arrays of lists itself.

    >>> own_operator("_indexing.rank").load()([[1, 2]], name="rank").numpy()
    np.int32(2)
    """
    return Operator(f"{ADAPTERS}{path}", **{"tensors": 0, **options})


def same(area: str, home: str, names: str, kind: Callable[[str], Entry] = At) -> dict[str, Entry]:
    """Return the entries of names in an area of `tf` that are the same in their home.

    Args:
        area: with what the names begin below `tf`.
        home: with what their paths begin.
        names: with spaces between them.
        kind: returns the entry of a path.

    >>> same("math.", "operator.", "add mul")["math.mul"].path
    'operator.mul'
    """
    return {f"{area}{name}": kind(f"{home}{name}") for name in names.split()}


def _named(value: Any, name: str | None) -> Any:
    """Return a value; in a model_fn, expose an array under its name."""
    # A scalar would be returned by each step, also one of the body of a loop, which cannot be.
    if name is not None and hasattr(value, "ndim") and value.ndim:
        from unisono.estimator.session._graph import expose

        expose(name, value)
    return value


@dataclasses.dataclass(frozen=True)
class Value:
    """The name is a plain value, such as a dtype.

    Args:
        value: the value.
        shown: how the page on migrating writes it.
    """

    value: Any
    shown: str
    note: str = ""

    @property
    def path(self) -> str:
        """How it is written."""
        return self.shown

    def load(self) -> Any:
        """Return the value."""
        return self.value


@dataclasses.dataclass(frozen=True)
class Missing:
    """The name has no counterpart.

    Args:
        why: the rest of a sentence that begins with the name.
        write: what to write instead.
    """

    why: str
    write: str


#: What becomes an array: an array, a number, or nested lists of them.
TensorLike = ArrayLike | Sequence["TensorLike"]

#: What the table says of one name.
Entry = At | Operator | Value | Missing


def device_dtype(dtype: Any) -> Any:
    """Return a dtype as JAX holds it: programs ask for `tf.int64` often, and each time JAX would warn.

    >>> device_dtype(np.dtype("int64")), device_dtype(None)
    (dtype('int32'), None)
    """
    is_number = isinstance(dtype, np.dtype) and dtype.kind not in "OSU"
    return jax.dtypes.canonicalize_dtype(dtype) if is_number else dtype


#: The names of arguments of `keras.ops` that are tensors.
_TENSORS = frozenset({"x", "x1", "x2"})


def _has_strings(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == object


def _as_array(value: Any) -> Any:
    if isinstance(value, keras.Variable):
        # Not all of Keras' operations take one.
        return value.value
    if not isinstance(value, (list, tuple)) or any(hasattr(item, "shape") for item in value):
        return value
    array = np.asarray(value)
    if array.dtype.kind in "SU":
        return object_at("unisono.tf.adapters.inputs._host_tensor.text")(array)
    # NumPy's own default is 64 bits, TensorFlow's 32.
    return array.astype("float32") if array.dtype == np.float64 else array


def taking_variables(function: Any) -> Any:
    """Return a function of `jax.numpy` that takes Keras' variables for arrays; all else as it is."""
    if not callable(function) or isinstance(function, type):
        return function

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        args, kwargs = jax.tree.map(lambda x: x.value if isinstance(x, keras.Variable) else x, (args, kwargs))
        return function(*args, **kwargs)

    return call


def object_at(path: str) -> Any:
    """Return the object of a dotted path.

    >>> object_at("os.path.join").__name__
    'join'
    """
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # An absent part of the path is an object, perhaps; an absent package behind it is an error.
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(f"No module named {parts[0]!r}", name=parts[0])
