"""The form of batches as a text, so that a worker can say what it has and the chief trace a function for it.

Tests: tests/unit/parameter_server/worker/test_batch_spec.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401 (NumPy then knows the names of bfloat16 and the float8 types)
import numpy as np

from unisono._errors import InvalidTypeError
from unisono.rpc._frames import dtype_name

#: Kept: `json.dumps` with options makes one for each step.
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def describe(batch: Any) -> tuple[str, list[np.ndarray[Any, Any]]]:
    """Return the form of a structure as a text, and its arrays in order.

    Raises:
        InvalidTypeError: for anything else in it.

    >>> text, leaves = describe((np.zeros((2, 3), np.float32), {"b": np.int32(1), "a": None}))
    >>> text, len(leaves)
    ('{"t":[["float32",[2,3]],{"d":[["a",null],["b",["int32",[]]]]}]}', 2)
    """
    leaves: list[np.ndarray[Any, Any]] = []
    form = _described(batch, leaves)
    return _ENCODER.encode(form), leaves


def _described(node: Any, leaves: list[np.ndarray[Any, Any]]) -> Any:
    if node is None:
        return None
    if isinstance(node, (tuple, list)):
        return {"t" if isinstance(node, tuple) else "l": [_described(each, leaves) for each in node]}
    if isinstance(node, Mapping):
        # In the order of the keys, as JAX has them.
        return {"d": [[key, _described(node[key], leaves)] for key in sorted(node)]}
    array = np.asarray(node)
    if array.dtype.kind in "OSUmM":
        raise InvalidTypeError(
            "Batches of a dataset on workers must be arrays of numbers. Received: "
            f"{type(node).__name__} of dtype {array.dtype}. Turn it into numbers in the dataset's `map`."
        )
    leaves.append(array)
    return [dtype_name(array.dtype), array.shape]


def rebuild(text: str, leaf: Callable[[np.dtype[Any], tuple[int, ...]], Any]) -> Any:
    """Return a structure of the form that a text describes.

    >>> rebuild('{"t":[["float32",[2]],null]}', lambda dtype, shape: shape)
    ((2,), None)
    """
    return _rebuilt(json.loads(text), leaf)


def _rebuilt(form: Any, leaf: Callable[[np.dtype[Any], tuple[int, ...]], Any]) -> Any:
    if form is None:
        return None
    if isinstance(form, Sequence):
        name, shape = form
        return leaf(np.dtype(name), tuple(shape))
    (kind, nodes), *_ = form.items()
    if kind == "d":
        return {key: _rebuilt(node, leaf) for key, node in nodes}
    found = [_rebuilt(node, leaf) for node in nodes]
    return tuple(found) if kind == "t" else found
