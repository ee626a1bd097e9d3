"""The signature of a Python generator: a structure of shapes and dtypes.

Tests: tests/unit/data/test_dataset_sources.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._types import UserValue
from unisono.data._batches import as_spec
from unisono.data._pipeline._structure import (
    Element,
    Path,
    TensorSpec,
    as_element,
    map_leaves,
    name_of,
    rebuild,
)


def as_signature(output_signature: Element, output_types: Element, output_shapes: Element) -> Element:
    """Return the signature that the arguments of `from_generator` describe.

    Raises:
        InvalidArgumentError: A signature was passed together with types or shapes.
        InvalidTypeError: A spec has no shape or no dtype.

    >>> as_signature(None, ("float32", "int32"), None)[1]
    TensorSpec(shape=None, dtype=dtype('int32'))
    """
    if output_signature is not None and (output_types is not None or output_shapes is not None):
        raise InvalidArgumentError(
            "A generator must be described in one way. "
            "Received: output_signature together with output_types or output_shapes. "
            "Write output_signature=TensorSpec(shape, dtype) only."
        )
    if output_signature is not None:
        return map_leaves(_as_spec, output_signature)
    # Types without shapes leave the rank open, as in tf.data.
    return None if output_types is None else _from_types(output_types, output_shapes)


def _as_spec(spec: object) -> TensorSpec:
    # The specs of JAX, Keras and TensorFlow fit, and arrays.
    if not (hasattr(spec, "shape") and hasattr(spec, "dtype")):
        raise InvalidTypeError(
            "output_signature must be made of specs with a shape and a dtype, in tuples and dicts. "
            f"Received: {spec!r}. Write unisono.data.TensorSpec(shape, dtype)."
        )
    return as_spec(spec)


def _from_types(types: Element, shapes: Element) -> Element:
    if isinstance(types, (tuple, Mapping)):
        keys = types if isinstance(types, Mapping) else range(len(types))
        return rebuild(
            types, [_from_types(types[key], None if shapes is None else shapes[key]) for key in keys]
        )
    return TensorSpec(shapes, types)


def conform(value: UserValue, signature: Element, path: Path = ()) -> Element:
    """Return `value` with the dtypes of a signature.

    Raises:
        InvalidTypeError: The structure differs.
        InvalidArgumentError: A shape differs.

    >>> conform((1, [2, 3]), (TensorSpec((), "float64"), TensorSpec((None,), "int64")))
    (np.float64(1.0), array([2, 3]))
    """
    if isinstance(signature, tuple):
        _check(isinstance(value, tuple) and len(value) == len(signature), value, signature, path)
        parts = [
            conform(part, spec, (*path, i))
            for i, (part, spec) in enumerate(zip(value, signature, strict=True))
        ]
        return rebuild(signature, parts)
    if isinstance(signature, Mapping):
        _check(isinstance(value, Mapping) and value.keys() == signature.keys(), value, signature, path)
        return {key: conform(value[key], spec, (*path, key)) for key, spec in signature.items()}
    if signature is None:
        return None
    # NumPy would make an array of a tuple, and hide that the structure differs: the shape must say so.
    is_array = not isinstance(value, tuple) or _is_row(value, signature.shape)
    _check(is_array and not isinstance(value, Mapping), value, signature, path)
    is_text = signature.dtype.kind in "OUS"
    # Strings are encoded first: NumPy would keep Python's `str` in an array of objects.
    leaf = as_element(value, path) if is_text else np.asarray(value, signature.dtype)[()]
    if not _fits(np.shape(leaf), signature.shape):
        raise InvalidArgumentError(
            "A generator must yield elements of its signature. "
            f"Received: {name_of(path)} of shape {np.shape(leaf)}, instead of {signature.shape}. "
            "Write None in the signature for a dimension that varies."
        )
    return leaf


def _is_row(value: tuple[object, ...], promised: Sequence[int | None] | None) -> bool:
    """Return whether a tuple of numbers is an array of one dimension, as its signature says."""
    numbers = all(isinstance(item, (int, float, np.number)) for item in value)
    return numbers and promised is not None and _fits((len(value),), promised)


def _fits(shape: Sequence[int], promised: Sequence[int | None] | None) -> bool:
    if promised is None:
        return True
    if len(shape) != len(promised):
        return False
    return all(wanted in (None, size) for size, wanted in zip(shape, promised, strict=True))


def _check(holds: bool, value: object, signature: Element, path: Path) -> None:
    if not holds:
        raise InvalidTypeError(
            "A generator must yield the structure of its signature. "
            f"Received: {value!r:.200} at {name_of(path)}, instead of {signature!r:.200}. "
            "Yield a tuple or dict of that form."
        )
