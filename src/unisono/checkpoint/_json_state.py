"""The contents of a checkpoint beside arrays: positions, numbers, the state of callbacks; as JSON.

Arrays inside are taken out and stored with the other arrays of the checkpoint: `EarlyStopping` may hold the
best weights of a large model, which would be slow as JSON.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TypeAlias

import jax
import numpy as np

from unisono._errors import InvalidTypeError
from unisono._types import Json, State
from unisono.checkpoint._unread_arrays import UnreadArray
from unisono.step._value_handle import ValueHandle

_KIND = "__kind__"

#: On the host, or not read yet.
HostArray: TypeAlias = "np.ndarray | UnreadArray"

#: On a device, on several workers' devices, or on the host.
Array: TypeAlias = "jax.Array | ValueHandle | HostArray"


def encode(value: State, arrays: dict[str, Array], where: str) -> Json:
    """Return `value` as JSON, with its arrays put into `arrays`.

    Args:
        value: numbers, strings, bytes, None, arrays, in lists, tuples, sets and dicts.
        arrays: grows by an entry for each array.
        where: prefix of the names of arrays, and what errors call the value.

    Returns:
        What `json` can write.

    Raises:
        InvalidTypeError: there is something else inside; it says where.

    >>> encode((1, b"a"), {}, "x")
    {'__kind__': 'tuple', 'items': [1, {'__kind__': 'bytes', 'base64': 'YQ=='}]}
    """
    if isinstance(value, np.ndarray) and value.dtype == object and not value.ndim:
        # What NumPy has no type for.
        value = value.item()
    # The exact types: NumPy's float64 is a Python float, too, and would return without its dtype.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (bytes, bytearray)):
        return {_KIND: "bytes", "base64": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, np.generic) and value.dtype.kind in "SU":
        return encode(value.item(), arrays, where)
    if _is_array(value) and value.dtype != object:
        # The count keeps names apart: keys of a dict may contain `.`, `[` and `#` themselves.
        name = f"{where}#{len(arrays)}"
        # A copy: training continues to change the original while this one is written.
        arrays[name] = np.array(value)
        return {_KIND: "scalar" if isinstance(value, np.generic) else "array", "name": name}
    if type(value) in (list, tuple, set, frozenset):
        items = [encode(v, arrays, f"{where}[{i}]") for i, v in enumerate(value)]
        return items if type(value) is list else {_KIND: type(value).__name__, "items": items}
    if type(value) is dict or isinstance(value, Mapping):
        return _encode_dict(value, arrays, where)
    raise InvalidTypeError(
        "Only numbers, strings, bytes, None and arrays, in lists, tuples, sets and dicts, can be kept in a "
        f"checkpoint. Received: {type(value).__name__} at {where}. Give the object `get_state()`, which "
        "returns such values, and `set_state(state)`."
    )


def _encode_dict(value: Mapping[State, State], arrays: dict[str, Array], where: str) -> Json:
    # A JSON object has only strings as keys, and `__kind__` marks the forms of this module.
    if all(type(k) is str for k in value) and _KIND not in value:
        return {k: encode(v, arrays, f"{where}.{k}") for k, v in value.items()}
    pairs = [[encode(k, arrays, where), encode(v, arrays, f"{where}[{k!r}]")] for k, v in value.items()]
    return {_KIND: "dict", "pairs": pairs}


def decode(value: Json, arrays: Mapping[str, Array]) -> State:
    """Inverse of `encode`.

    >>> decode(encode({1: (2, {3})}, {}, "x"), {})
    {1: (2, {3})}
    """
    if isinstance(value, list):
        return [decode(v, arrays) for v in value]
    if not isinstance(value, dict):
        return value
    match value.get(_KIND):
        case None:
            return {k: decode(v, arrays) for k, v in value.items()}
        case "bytes":
            return base64.b64decode(value["base64"])
        case "array":
            return np.asarray(arrays[value["name"]])
        case "scalar":
            # A NumPy scalar again; the stored array has no dimensions.
            return np.asarray(arrays[value["name"]])[()]
        case "dict":
            return {decode(k, arrays): decode(v, arrays) for k, v in value["pairs"]}
        case kind:
            made = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
            return made(decode(v, arrays) for v in value["items"])


def stand_ins(arrays: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """Return arrays of the same shapes and types without their elements, which a check does not read.

    >>> stand_ins({"a": np.ones(3)})
    {'a': array([0., 0., 0.])}
    """
    return {name: np.broadcast_to(np.zeros((), a.dtype), a.shape) for name, a in arrays.items()}


def check_encoded(value: Json, arrays: Mapping[str, Array]) -> None:
    """Check that a value can be decoded.

    Raises:
        ValueError: it is not what `encode` returns, or names an array that is not there.

    >>> check_encoded({"__kind__": "array", "name": "x#0"}, {})
    Traceback (most recent call last):
        ...
    ValueError: a state is none that Unisono writes (KeyError: 'x#0')
    """
    try:
        decode(value, arrays)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a state is none that Unisono writes ({type(error).__name__}: {error})") from None


def _is_array(value: object) -> bool:
    return isinstance(value, (np.ndarray, np.generic)) or (
        hasattr(value, "__array__") and hasattr(value, "dtype") and hasattr(value, "shape")
    )
