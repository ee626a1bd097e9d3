"""Elements of a data set: nested tuples and dicts of numbers, strings and arrays; pure functions on them.

Tuples, named tuples and dicts are structure. Everything else is a component: a list becomes an array, as in
`tf.data`. `jax.tree` is not used, because for it lists are structure, too.

Tests: tests/unit/data/test_dataset_sources.py, tests/unit/data/test_dataset_transforms.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._system._json import MALFORMED, parse_json

#: A structure of components, as it passes through the pipeline.
Element: TypeAlias = Any

#: One part of an element: a NumPy array or scalar, bytes, or a data set of `window`.
Component: TypeAlias = Any

#: The indices and keys that lead from an element to a component.
Path: TypeAlias = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one component of an element.

    Args:
        shape: Sizes of the dimensions, with None for a size that is unknown or varies; None if the rank is
            unknown.
        dtype: The numpy dtype; strings are `object` arrays of bytes.
        name: Is not used: elements have no names.

    >>> TensorSpec((None, 28, 28), "float32").dtype
    dtype('float32')
    """

    shape: tuple[int | None, ...] | None
    dtype: np.dtype[Any]

    def __init__(
        self,
        shape: Sequence[int | None] | None = None,
        dtype: npt.DTypeLike = np.float32,
        name: str | None = None,
    ) -> None:
        object.__setattr__(self, "shape", None if shape is None else tuple(shape))
        # "string" is `tf.string`.
        kind = object if isinstance(dtype, str) and dtype == "string" else dtype
        object.__setattr__(self, "dtype", np.dtype(kind))


@dataclasses.dataclass(frozen=True)
class DatasetSpec:
    """The spec of a component that is itself a data set.

    Args:
        element_spec: Spec of its elements.

    >>> DatasetSpec(TensorSpec((), "int32")).element_spec.dtype.name
    'int32'
    """

    element_spec: Element


def is_dataset(value: object) -> bool:
    """Return whether a component is a data set, as in a window."""
    # An attribute instead of `isinstance`: `Dataset` is above this module, and would be a circular import.
    return getattr(value, "_is_data_set", False) is True


def check_no_dataset(value: Component, path: Path, what: str) -> None:
    """Check that a component is not itself a data set."""
    if is_dataset(value) or isinstance(value, DatasetSpec):
        raise InvalidTypeError(
            f"Data sets cannot be {what}. Received: {name_of(path)} is a data set. "
            "Write window(5).flat_map(lambda window: window.batch(5)) first."
        )


def rebuild(like: Element, parts: Sequence[Element]) -> Element:
    """Return `parts` in the tuple or dict type of `like`."""
    if type(like) is tuple:
        return tuple(parts)
    if isinstance(like, dict):
        return dict(zip(like, parts, strict=True))
    # Named tuples take their fields as arguments; `_make` takes an iterable.
    return getattr(type(like), "_make", tuple)(parts)


def map_leaves(fn: Callable[[Any], Any], element: Element) -> Element:
    """Return the structure of `element` with `fn` applied to each component; None stays None.

    >>> map_leaves(lambda x: x + 1, (1, {"a": 2}))
    (2, {'a': 3})
    """
    if isinstance(element, tuple):
        return rebuild(element, [map_leaves(fn, part) for part in element])
    if isinstance(element, dict):
        return {key: map_leaves(fn, part) for key, part in element.items()}
    return None if element is None else fn(element)


def leaves(element: Element, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield each component of `element` with its path; None is skipped.

    >>> list(leaves((1, {"a": 2})))
    [((0,), 1), ((1, 'a'), 2)]
    """
    if isinstance(element, tuple):
        for index, part in enumerate(element):
            yield from leaves(part, (*path, index))
    elif isinstance(element, dict):
        for key, part in element.items():
            yield from leaves(part, (*path, key))
    elif element is not None:
        yield path, element


def name_of(path: Path) -> str:
    """Return a path as it is written in Python: `component [1]['image']`."""
    return "component " + "".join(f"[{key!r}]" for key in path) if path else "the element"


def combine(
    fn: Callable[[Sequence[Any], Path], Any], elements: Sequence[Element], path: Path = ()
) -> Element:
    """Return one element whose components are `fn(components of all elements, path)`.

    Raises:
        InvalidArgumentError: The structures differ.

    >>> combine(lambda parts, path: sum(parts), [(1, {"a": 2}), (3, {"a": 4})])
    (4, {'a': 6})
    """
    first = elements[0]
    if isinstance(first, tuple):
        _check_alike(elements, path, lambda other: isinstance(other, tuple) and len(other) == len(first))
        parts = zip(*elements, strict=True)
        return rebuild(first, [combine(fn, part, (*path, index)) for index, part in enumerate(parts)])
    if isinstance(first, dict):
        _check_alike(elements, path, lambda other: isinstance(other, dict) and other.keys() == first.keys())
        return {key: combine(fn, [element[key] for element in elements], (*path, key)) for key in first}
    _check_alike(
        elements,
        path,
        lambda other: (other is None) == (first is None) and not isinstance(other, (tuple, dict)),
    )
    return None if first is None else fn(elements, path)


def _check_alike(elements: Sequence[Element], path: Path, alike: Callable[[Element], bool]) -> None:
    for number, element in enumerate(elements):
        if not alike(element):
            raise InvalidArgumentError(
                "All elements must have the same structure. "
                f"Received: {_outline(elements[0])} as element 0 and {_outline(element)} as element "
                f"{number}, at {name_of(path)}. "
                "Make the function or generator return the same tuples and dict keys."
            )


def _outline(element: Element) -> str:
    if isinstance(element, tuple):
        return f"a tuple of {len(element)}"
    if isinstance(element, dict):
        return f"a dict with keys {list(element)}"
    return f"a {type(element).__name__}"


def as_element(value: object, path: Path = ()) -> Element:
    """Return `value` with numpy components, by the dtype rules of `tf.data`.

    Python floats become float32, Python ints int32 (int64 where they do not fit), strings bytes; numpy
    arrays and scalars keep their dtype.

    Raises:
        InvalidArgumentError: A list is ragged.
        InvalidTypeError: A component is neither numbers nor strings.

    >>> as_element(([1.0, 2.0], "a"))
    (array([1., 2.], dtype=float32), b'a')
    """
    # Arrays of rank 0 become scalars in `_plain`, and strings become bytes.
    if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind not in "OUS":
        return value
    if isinstance(value, tuple):
        return rebuild(value, [as_element(part, (*path, index)) for index, part in enumerate(value)])
    if isinstance(value, Mapping):
        return {key: as_element(part, (*path, key)) for key, part in value.items()}
    return None if value is None else _as_leaf(value, path)


def _as_leaf(value: object, path: Path) -> Component:
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(np.asarray(value), value, path)
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if is_dataset(value):
        return value
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidArgumentError(
            "A list must be rectangular to become an array. "
            f"Received: {name_of(path)} = {value!r:.200}. "
            "Yield each row as an element (from_generator) and use padded_batch()."
        ) from error
    if isinstance(value, (bool, int, float, list)) and not _holds_numpy(value):
        array = _narrowed(array)
    return _plain(array, value, path)


def _holds_numpy(value: object) -> bool:
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    # First numpy's own types: np.float64 is a subclass of float.
    return isinstance(value, np.generic) or not isinstance(value, (bool, int, float, str, bytes, list, tuple))


def _narrowed(array: np.ndarray) -> np.ndarray:
    # As tf.data converts Python numbers; numbers of NumPy keep their dtype, see `_holds_numpy`.
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype == np.int64 and (array == array.astype(np.int32)).all():
        return array.astype(np.int32)
    return array


def _plain(array: np.ndarray, value: object, path: Path) -> Component:
    if array.dtype.kind in "US":
        array = (np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array).astype(object)
    elif array.dtype.kind == "O":
        array = _bytes_array(array, value, path)
    return array[()] if array.ndim == 0 else array


def _bytes_array(array: np.ndarray, value: object, path: Path) -> np.ndarray:
    result = np.empty(array.shape, object)
    for index, item in np.ndenumerate(array):
        if not isinstance(item, (str, bytes)):
            raise InvalidTypeError(
                "A component must hold numbers or strings. "
                f"Received: {name_of(path)} of type {type(value).__name__} = {value!r:.200}. "
                "Return numpy arrays, numbers, strings, or tuples and dicts of them."
            )
        result[index] = item.encode() if isinstance(item, str) else item
    return result


def frozen(element: Element) -> Element:
    """Return the element with read-only views of its arrays, which later passes will read again."""
    return map_leaves(_frozen_leaf, element)


def _frozen_leaf(leaf: Component) -> Component:
    if isinstance(leaf, np.ndarray):
        # The flag belongs to the view: the user's own array stays writable.
        leaf = leaf.view()
        leaf.flags.writeable = False
    return leaf


def leading_size(arrays: Element) -> int:
    """Return the number of rows, which all components must share.

    >>> leading_size((np.zeros((3, 2)), np.zeros(3)))
    3
    """
    named = list(leaves(arrays))
    if not named:
        raise InvalidArgumentError(
            "Tensors must have at least one component. Received: none. Write from_tensor_slices(x)."
        )
    sizes = [(path, np.shape(leaf)) for path, leaf in named]
    for path, shape in sizes:
        if not shape:
            raise InvalidArgumentError(
                "Each component must have a first dimension to slice. "
                f"Received: {name_of(path)} is a scalar. "
                "Write from_tensors(...) for a single element."
            )
        if shape[0] != sizes[0][1][0]:
            raise InvalidArgumentError(
                "All components must have the same number of rows. "
                f"Received: {name_of(sizes[0][0])} with {sizes[0][1][0]} rows and {name_of(path)} with "
                f"{shape[0]} rows. "
                "Cut them to the same length first."
            )
    return int(sizes[0][1][0])


def row(arrays: Element, position: int) -> Element:
    """Return one row of each component."""
    return map_leaves(lambda array: array[position], arrays)


def gather(arrays: Element, positions: np.ndarray) -> Element:
    """Return the rows at `positions` of each component, as fresh arrays.

    >>> gather(np.arange(5) * 10, np.array([3, 1]))
    array([30, 10])
    """
    # Without a shuffle positions are successive, and a slice is copied faster than rows one by one.
    first, count = int(positions[0]), len(positions)
    if count > 1 and positions[-1] - first == count - 1 and bool((np.diff(positions) == 1).all()):
        # Copied, because the caller may write into a batch.
        return map_leaves(lambda array: array[first : first + count].copy(), arrays)
    return map_leaves(lambda array: array.take(positions, axis=0), arrays)


def stack(elements: Sequence[Element]) -> Element:
    """Return the elements stacked along a new first dimension.

    Raises:
        InvalidArgumentError: Structures or shapes differ.

    >>> stack([(1, b"a"), (2, b"b")])
    (array([1, 2]), array([b'a', b'b'], dtype=object))
    """
    return combine(_stack_leaves, elements)


def _stack_leaves(parts: Sequence[Any], path: Path) -> np.ndarray:
    check_no_dataset(parts[0], path, "stacked")
    try:
        if isinstance(parts[0], np.ndarray):
            return np.stack(parts)
        # NumPy's own byte strings would lose trailing zero bytes.
        return np.array(parts, dtype=object if isinstance(parts[0], bytes) else None)
    except ValueError as error:
        shapes = [np.shape(part) for part in parts]
        odd = next((number for number, shape in enumerate(shapes) if shape != shapes[0]), 0)
        raise InvalidArgumentError(
            "The elements of a batch must have one shape. "
            f"Received: {name_of(path)} of shape {shapes[0]} in element 0 and {shapes[odd]} in element "
            f"{odd} of a batch. Write padded_batch(...), or bring them to one shape with map()."
        ) from error


def concatenated(batches: Sequence[Element]) -> Element:
    """Return batches joined along their first dimension."""
    # Most batches lie within one repetition, or one input batch: these are not copied again.
    if len(batches) == 1:
        return batches[0]
    return combine(lambda parts, path: np.concatenate(parts), batches)


def spec_of(element: Element) -> Element:
    """Return the `TensorSpec` of each component.

    >>> spec_of(np.zeros((2, 3), np.float32))
    TensorSpec(shape=(2, 3), dtype=dtype('float32'))
    """
    return map_leaves(_leaf_spec, element)


def _leaf_spec(leaf: Component) -> TensorSpec | DatasetSpec:
    if is_dataset(leaf):
        return DatasetSpec(leaf.element_spec)
    if isinstance(leaf, bytes):
        return TensorSpec((), object)
    return TensorSpec(np.shape(leaf), leaf.dtype)


def spec_as_bytes(spec: TensorSpec) -> bytes:
    """Return a spec as JSON."""
    check_no_dataset(spec, (), "written to a file")
    # As bytes, because the store holds components, and a spec is not one.
    return json.dumps([spec.shape, spec.dtype.str]).encode()


def spec_from_bytes(data: bytes) -> TensorSpec:
    """Return the spec of a JSON text: the inverse of `spec_as_bytes`.

    >>> spec_from_bytes(spec_as_bytes(TensorSpec((None, 3), "int64")))
    TensorSpec(shape=(None, 3), dtype=dtype('int64'))
    """
    try:
        shape, dtype = parse_json(data)
        return TensorSpec(shape, dtype)
    except MALFORMED as error:
        raise InvalidArgumentError(
            "The first element of a saved data set must say what the others look like. Received: "
            f"{repr(data)[:200]} ({type(error).__name__}: {error}). Save it again."
        ) from error


def batched_spec(spec: Element, batch_size: int | None) -> Element:
    """Return a spec with a new first dimension; a spec of unknown rank is unchanged."""
    return map_leaves(
        lambda leaf: leaf if leaf.shape is None else TensorSpec((batch_size, *leaf.shape), leaf.dtype), spec
    )


def unbatched_spec(spec: Element) -> Element:
    """Return a spec without its first dimension."""
    return map_leaves(
        lambda leaf: leaf if leaf.shape is None else TensorSpec(leaf.shape[1:], leaf.dtype), spec
    )
