"""Names for types that Python cannot spell: JAX and Keras take structures of any shape.

They are `Any` for the type checker, and say for a reader what is meant.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

#: A nested structure of arrays, as `jax.tree` takes it: an array, tuples, lists and dicts of them, or None.
PyTree: TypeAlias = Any

#: A structure of arrays, for a function that returns the same structure around arrays of the same kind.
Tree = TypeVar("Tree")

#: Whatever becomes an array: a NumPy or JAX array, a Python number, nested lists of numbers.
ArrayLike: TypeAlias = Any

#: What the user's function returns, or an argument for it, which the library hands on unread.
UserValue: TypeAlias = Any

#: Positional and keyword arguments of a call.
CallArguments: TypeAlias = tuple[tuple[object, ...], dict[str, object]]

#: What Keras hands to a hook of a callback: numbers by name, which the callback may change.
Logs: TypeAlias = dict[str, Any] | None

#: What a checkpoint can hold besides variables, such as what `get_state` returns: numbers, strings, bytes,
#: None and arrays, in lists, tuples, sets and dicts.
State: TypeAlias = Any

#: What `json` writes and reads.
Json: TypeAlias = Any

#: What a checkpoint can be given: models, layers, optimizers, metrics, variables, iterators, anything with
#: `get_state` and `set_state`, pytrees of arrays, and lists and dicts of these.
Trackable: TypeAlias = Any

#: What replaces a method of Keras: called with the original, the object and the arguments.
Wrapper: TypeAlias = Callable[..., object]

#: What is replaced: the class or module, the name of its method, property or function; and by what.
KerasWrap: TypeAlias = tuple[type | ModuleType, str, Wrapper]
