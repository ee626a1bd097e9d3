"""Batch elements of different shapes: pad each component to one shape; pure.

Tests: tests/unit/data/test_dataset_transforms.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._types import ArrayLike
from unisono.data._pipeline._structure import Element, Path, TensorSpec, check_no_dataset, combine, name_of


def pad(elements: Sequence[Element], shapes: Element = None, values: Element = None) -> Element:
    """Return the elements stacked, each component padded at the end to a common shape.

    Args:
        shapes: For each component the shape after padding, with None (or -1) for the size of the longest
            element in the batch; None for all components.
        values: For each component the number or string to pad with, or one for all; None pads with 0 and b"".

    Raises:
        InvalidArgumentError: A component does not have the rank of its shape, or is larger.

    >>> pad([np.array([1, 2]), np.array([3])])
    array([[1, 2],
           [3, 0]])
    """
    return combine(lambda parts, path: _padded(parts, path, at(shapes, path), at(values, path)), elements)


def padded_spec(spec: Element, batch_size: int | None, shapes: Element) -> Element:
    """Return the spec of padded batches; padded dimensions without a fixed size are None.

    >>> padded_spec(TensorSpec((3,), "int32"), None, None).shape
    (None, None)
    """

    def padded(parts: Sequence[TensorSpec], path: Path) -> TensorSpec:
        (leaf,), wanted = parts, at(shapes, path)
        # Where nothing says what it will be, an unknown rank stays unknown.
        if wanted is None and leaf.shape is None:
            return leaf
        sizes = [None] * len(leaf.shape or ()) if wanted is None else with_sizes(wanted, None)
        return TensorSpec((batch_size, *sizes), leaf.dtype)

    return combine(padded, [spec])


def at(nested: Element, path: Path) -> Any:
    """Return the part of a structure at a path; one value is for all paths."""
    # A shape is itself a tuple, so the path in the elements decides the depth.
    for key in path:
        if not isinstance(nested, (tuple, Mapping)):
            return nested
        nested = nested[key]
    return nested


def with_sizes(shape: Sequence[int | None], size: int | None) -> tuple[int | None, ...]:
    """Return a shape with `size` for each dimension that varies."""
    # As in tf.data, -1 is another way to write None.
    return tuple(size if n in (None, -1) else n for n in shape)


def _padded(
    parts: Sequence[Any], path: Path, wanted: Sequence[int | None] | None, value: ArrayLike
) -> np.ndarray:
    check_no_dataset(parts[0], path, "stacked")
    shapes = [np.shape(part) for part in parts]
    target = _target(shapes, path, wanted)
    # Strings as objects: NumPy's own byte strings lose trailing zero bytes.
    dtype = np.dtype(object) if isinstance(parts[0], bytes) else parts[0].dtype
    fill = value if value is not None else (b"" if dtype.hasobject else 0)
    fill = fill.encode() if isinstance(fill, str) else fill
    batch = np.full((len(parts), *target), fill, dtype)
    for number, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
        inside: tuple[Any, ...] = (number, *(slice(size) for size in shape))
        batch[inside] = part
    return batch


def _target(shapes: list[tuple[int, ...]], path: Path, wanted: Sequence[int | None] | None) -> list[int]:
    rank = len(shapes[0]) if wanted is None else len(wanted)
    for number, shape in enumerate(shapes):
        if len(shape) != rank:
            raise InvalidArgumentError(
                "The components that padded_batch() stacks must have one rank. "
                f"Received: {name_of(path)} of shape {shape} in element {number}, instead of rank {rank}. "
                "Write padded_shapes of that rank, or reshape with map()."
            )
    longest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    if wanted is None:
        return longest
    target = [long if size in (None, -1) else int(size) for size, long in zip(wanted, longest, strict=True)]
    if any(long > size for long, size in zip(longest, target, strict=True)):
        raise InvalidArgumentError(
            "Elements must not be larger than their padded shape. "
            f"Received: {name_of(path)} of up to {tuple(longest)}, padded_shapes={tuple(wanted)}. "
            "Write None for a dimension that takes the size of the longest element."
        )
    return target
