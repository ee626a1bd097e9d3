"""Structures of arrays: shapes with named sizes, nested in dicts, lists and tuples; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from unisono._errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and type of one array.

    Args:
        shape: sizes; a string names a size that each call chooses: `("batch", 28, 28, 1)`. In
            what is given to `export`, None leaves the name to Unisono.
        dtype: the type's name: `"float32"`.
        name: what the model calls it.

    >>> ArraySpec(("batch", 3), "float32")
    ArraySpec(shape=('batch', 3), dtype='float32', name=None)
    """

    shape: tuple[int | str | None, ...]
    dtype: str
    name: str | None = None


def plain(tree: Any) -> Any:
    """Copy a structure with Python's own containers in the place of Keras' tracked ones."""
    return map_leaves(lambda leaf: leaf, tree)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the structure with `function(leaf)` for each leaf, called in the order of `leaves`."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, tree[key]) for key in sorted(tree)}
    if isinstance(tree, list):
        return [map_leaves(function, item) for item in tree]
    if isinstance(tree, tuple):
        return tuple(map_leaves(function, item) for item in tree)
    return None if tree is None else function(tree)


def leaves(tree: Any) -> list[Any]:
    """Return the leaves, dicts in the order of their sorted keys.

    >>> leaves({"b": 2, "a": [1, None]})
    [1, 2]
    """
    found: list[Any] = []
    map_leaves(found.append, tree)
    return found


def rebuild(tree: Any, values: Sequence[Any]) -> Any:
    """Return the structure of `tree` with `values` as its leaves."""
    left = iter(values)
    return map_leaves(lambda _: next(left), tree)


def encode(tree: Any) -> Any:
    """Write a structure of `ArraySpec`s as what JSON can hold."""
    if isinstance(tree, Mapping):
        return {"dict": [[key, encode(tree[key])] for key in sorted(tree)]}
    if isinstance(tree, list):
        return {"list": [encode(item) for item in tree]}
    if isinstance(tree, tuple):
        return {"tuple": [encode(item) for item in tree]}
    if tree is None:
        return None
    return {"array": {"shape": list(tree.shape), "dtype": tree.dtype, "name": tree.name}}


def decode(record: Any) -> Any:
    """Read what `encode` wrote."""
    if record is None:
        return None
    if "dict" in record:
        return {key: decode(item) for key, item in record["dict"]}
    if "list" in record:
        return [decode(item) for item in record["list"]]
    if "tuple" in record:
        return tuple(decode(item) for item in record["tuple"])
    array = record["array"]
    return ArraySpec(tuple(array["shape"]), array["dtype"], array["name"])


def matched(spec: Any, value: Any, where: str) -> Iterator[tuple[str, ArraySpec, Any]]:
    """Yield where each array lies, its spec, and its value, in the order of `leaves`.

    Args:
        spec: a structure of `ArraySpec`s.
        value: arrays in the same structure; lists and tuples are the same here.
        where: how messages call the whole.

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
            value = [value]  # as Keras has it for a model with one input
        if not isinstance(value, list | tuple) or len(value) != len(spec):
            raise _other_structure(where, f"a {type(spec).__name__} of {len(spec)}", value)
        for index, (one_spec, one) in enumerate(zip(spec, value, strict=True)):
            yield from matched(one_spec, one, f"{where}[{index}]")
    elif spec is None or isinstance(value, Mapping) or value is None:
        if spec is not None or value is not None:
            raise _other_structure(where, "None" if spec is None else f"an array of {spec.shape}", value)
    else:
        yield where, spec, value


def _other_structure(where: str, expected: str, value: Any) -> InvalidArgumentError:
    if isinstance(value, Mapping):
        received = f"a dict with the keys {sorted(map(str, value))}"
    elif isinstance(value, list | tuple):
        received = f"a {type(value).__name__} of {len(value)}"
    else:
        received = f"a {type(value).__name__}"
    return InvalidArgumentError(
        f"`{where}` must be {expected}. Received: {received}. Write the inputs as `input_spec` has them."
    )


def bind_sizes(spec: ArraySpec, shape: Sequence[int], where: str, sizes: dict[str, int]) -> None:
    """Check a shape, and note the sizes that its names stand for.

    Args:
        spec: what the shape must be.
        shape: what it is.
        where: how messages call the array.
        sizes: sizes of names seen in this call; filled up here.

    Raises:
        InvalidArgumentError: when the shape is another.

    >>> sizes = {}
    >>> bind_sizes(ArraySpec(("batch", 3), "float32"), (7, 3), "inputs", sizes)
    >>> sizes
    {'batch': 7}
    """
    fits = len(shape) == len(spec.shape)
    for wanted, size in zip(spec.shape, shape, strict=False):
        expected = sizes.setdefault(wanted, size) if isinstance(wanted, str) else wanted
        fits = fits and size == expected and size > 0
    if not fits:
        known = {name: sizes[name] for name in spec.shape if isinstance(name, str) and name in sizes}
        raise InvalidArgumentError(
            f"`{where}` must have the shape {spec.shape} with sizes of at least 1"
            f"{f', where {known} in this call' if known else ''}. Received: shape={tuple(shape)}. "
            "Reshape it; a size that was fixed can be left open by exporting the model again."
        )
