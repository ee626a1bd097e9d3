"""Structures of arrays: shapes with named sizes, nested in dicts, lists and tuples; pure.

Tests: tests/unit/test_export_specs.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from unisono._errors import InvalidArgumentError
from unisono._types import PyTree

#: The platforms that `jax.export` knows.
PLATFORMS = ("cpu", "cuda", "tpu", "rocm")


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """The shape and the type of an array.

    Args:
        shape: the sizes; a string names a size that each call chooses: `("batch", 28, 28, 1)`. In the
            argument of `export`, None stands for a name that Unisono chooses.
        dtype: the name of the type: `"float32"`.
        name: the model's name for the array.

    >>> ArraySpec(("batch", 3), "float32")
    ArraySpec(shape=('batch', 3), dtype='float32', name=None)
    """

    shape: tuple[int | str | None, ...]
    dtype: str
    name: str | None = None


def plain(tree: PyTree) -> PyTree:
    """Copy a structure, with Python's own containers instead of Keras' tracked ones."""
    return map_leaves(lambda leaf: leaf, tree)


def map_leaves(function: Callable[[Any], object], tree: PyTree) -> PyTree:
    """Return the structure with `function(leaf)` for each leaf, called in the order of `leaves`."""
    if isinstance(tree, Mapping):
        # Sorted, as JAX orders the leaves of a dict.
        return {key: map_leaves(function, tree[key]) for key in sorted(tree)}
    if isinstance(tree, list):
        return [map_leaves(function, item) for item in tree]
    if isinstance(tree, tuple):
        return tuple(map_leaves(function, item) for item in tree)
    return None if tree is None else function(tree)


def leaves(tree: PyTree) -> list[Any]:
    """Return the leaves, with dicts in the order of their sorted keys.

    >>> leaves({"b": 2, "a": [1, None]})
    [1, 2]
    """
    listed: list[Any] = []
    map_leaves(listed.append, tree)
    return listed


def rebuild(tree: PyTree, values: Sequence[Any]) -> PyTree:
    """Return the structure of `tree` with `values` as its leaves."""
    left = iter(values)
    return map_leaves(lambda _: next(left), tree)


def encode(tree: PyTree) -> dict[str, Any] | None:
    """Return a structure of `ArraySpec`s and Python's plain values as dicts and lists for JSON."""
    if isinstance(tree, Mapping):
        # Pairs, because the objects of JSON have only strings as keys.
        return {"dict": [[key, encode(tree[key])] for key in sorted(tree)]}
    if isinstance(tree, list):
        return {"list": [encode(item) for item in tree]}
    if isinstance(tree, tuple):
        return {"tuple": [encode(item) for item in tree]}
    if tree is None:
        return None
    if isinstance(tree, (bool, int, float, str)):
        return {"value": tree}
    return {"array": {"shape": list(tree.shape), "dtype": tree.dtype, "name": tree.name}}


def decode(record: dict[str, Any] | None) -> PyTree:
    """Return the structure of `ArraySpec`s: the inverse of `encode`."""
    if record is None:
        return None
    if "dict" in record:
        return {key: decode(item) for key, item in record["dict"]}
    if "list" in record:
        return [decode(item) for item in record["list"]]
    if "tuple" in record:
        return tuple(decode(item) for item in record["tuple"])
    if "value" in record:
        return record["value"]
    array = record["array"]
    return ArraySpec(tuple(array["shape"]), array["dtype"], array["name"])


def matched(spec: PyTree, value: object, where: str) -> Iterator[tuple[str, Any, object]]:
    """Yield the path, the spec and the value of each array, in the order of `leaves`.

    Raises:
        InvalidArgumentError: at the first place where the structures differ.
    """
    if isinstance(spec, Mapping):
        if not isinstance(value, Mapping) or set(value) != set(spec):
            raise _other_structure(where, f"a dict with the keys {sorted(spec)}", value)
        for key in sorted(spec):
            yield from matched(spec[key], value[key], f"{where}[{key!r}]")
    elif isinstance(spec, list | tuple):
        if len(spec) == 1 and not isinstance(value, list | tuple | Mapping):
            value = [value]  # as Keras does for a model with one input
        if not isinstance(value, list | tuple) or len(value) != len(spec):
            raise _other_structure(where, f"a {type(spec).__name__} of {len(spec)}", value)
        for index, (one_spec, one) in enumerate(zip(spec, value, strict=True)):
            yield from matched(one_spec, one, f"{where}[{index}]")
    elif spec is None or isinstance(value, Mapping) or value is None:
        if spec is not None or value is not None:
            raise _other_structure(where, "None" if spec is None else f"an array of {spec.shape}", value)
    else:
        yield where, spec, value


def _other_structure(where: str, expected: str, value: object) -> InvalidArgumentError:
    if isinstance(value, Mapping):
        received = f"a dict with the keys {sorted(map(str, value))}"
    elif isinstance(value, list | tuple):
        received = f"a {type(value).__name__} of {len(value)}"
    else:
        received = f"a {type(value).__name__}"
    return InvalidArgumentError(
        f"`{where}` must be {expected}. Received: {received}. Pass inputs in the structure of `input_spec`."
    )


def bind_sizes(spec: ArraySpec, shape: Sequence[int], where: str, sizes: dict[str, int]) -> None:
    """Check a shape, and record the sizes of its named dimensions.

    >>> sizes = {}
    >>> bind_sizes(ArraySpec(("batch", 3), "float32"), (7, 3), "inputs", sizes)
    >>> sizes
    {'batch': 7}
    """
    fits = len(shape) == len(spec.shape)
    for wanted, size in zip(spec.shape, shape, strict=False):
        expected = sizes.setdefault(wanted, size) if isinstance(wanted, str) else wanted
        # `jax.export` assumes sizes of at least 1: its program may be wrong for empty arrays.
        fits = fits and size == expected and size > 0
    if not fits:
        known = {name: sizes[name] for name in spec.shape if isinstance(name, str) and name in sizes}
        raise InvalidArgumentError(
            f"`{where}` must have the shape {spec.shape} with sizes of at least 1"
            f"{f', where {known} in this call' if known else ''}. Received: shape={tuple(shape)}. "
            "Reshape it, or export the model again with a size that is not fixed."
        )
