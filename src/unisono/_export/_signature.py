"""The shapes and types of a Keras model's inputs, with names for open sizes.

Tests: tests/virtual/test_export.py.
"""

from __future__ import annotations

import dataclasses
import re

import keras
import numpy as np

from unisono._checks import whole_number
from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._export._specs import ArraySpec, leaves, map_leaves, plain
from unisono._types import PyTree, UserValue

#: The names of sizes that `jax.export` accepts.
_NAME = re.compile(r"[A-Za-z_]\w*")


def input_specs(model: keras.Model, given: PyTree, batch_size: int | None) -> PyTree:
    """Return the structure of the model's inputs, each leaf an `ArraySpec` without None.

    Args:
        given: the caller's structure of objects with a shape and a dtype; None takes the model's.
        batch_size: the size of the first axis; None leaves it open where the model does.

    Raises:
        InvalidArgumentError: when the model is not built, or does not define its inputs.
    """
    if not model.built:
        raise InvalidArgumentError(
            f"A model must be built before it is exported. Received: {model.name!r}, which has no weights "
            "yet. Call it on a batch, or start it with `keras.Input(...)`."
        )
    size = None if batch_size is None else whole_number(batch_size, 1)
    if batch_size is not None and size is None:
        raise InvalidArgumentError(
            f"`batch_size` must be an int of at least 1, or None. Received: batch_size={batch_size!r}. "
            "Leave it out for batches of any size."
        )
    tree = map_leaves(_spec_of, _own_inputs(model) if given is None else given)
    # By identity, because two inputs may have equal specs; `_spec_of` has created each of them anew.
    number = {id(leaf): index for index, leaf in enumerate(leaves(tree))}
    return map_leaves(lambda spec: _named(spec, number[id(spec)], size), tree)


def _own_inputs(model: keras.Model) -> PyTree:
    if isinstance(model, keras.Sequential):
        return model.inputs[0] if len(model.inputs) == 1 else list(model.inputs)
    try:
        return plain(model.input)
    except (AttributeError, ValueError):
        # A subclassed model has no symbolic input, but it records the shapes that it was built with.
        return _built_inputs(model)


def _built_inputs(model: keras.Model) -> PyTree:
    config = model.get_build_config() or {}
    # Keras writes `shapes_dict` for a `build` of several shapes, and `input_shape` for one.
    shapes = config.get("shapes_dict", {"input_shape": config.get("input_shape")})
    values = list(shapes.values())
    if len(values) != 1 or values[0] is None:
        raise InvalidArgumentError(
            f"A model must define the shape of its argument `inputs`. Received: {model.name!r}, which was "
            f"built with {shapes}. Write `export(..., input_spec=unisono.export.ArraySpec((None, 28, 28), "
            "'float32'))`, or a dict or list of them, in the structure that the model's `call` takes."
        )
    return _open_shapes(values[0], model.input_dtype)


def _open_shapes(shapes: PyTree, dtype: str) -> PyTree:
    """Return a structure of shapes as specs with open batch sizes."""
    if isinstance(shapes, dict):
        return {key: _open_shapes(value, dtype) for key, value in shapes.items()}
    if all(size is None or isinstance(size, int) for size in shapes):
        return ArraySpec((None, *shapes[1:]), dtype)
    return type(shapes)(_open_shapes(item, dtype) for item in shapes)


def _spec_of(leaf: UserValue) -> ArraySpec:
    try:
        shape, dtype = tuple(leaf.shape), leaf.dtype
    except (AttributeError, TypeError) as error:
        raise InvalidTypeError(
            "`input_spec` must hold objects with a shape and a dtype. Received: "
            f"{leaf!r}. Write `unisono.export.ArraySpec((None, 28, 28), 'float32')`."
        ) from error
    dtype = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    return ArraySpec(shape, dtype, getattr(leaf, "name", None))


def _named(spec: ArraySpec, index: int, batch_size: int | None) -> ArraySpec:
    """Name the open sizes of an input: `batch` is common to all inputs, other names are particular to one."""
    # A name of its own for each: `jax.export` would demand that sizes of one name are equal.
    shape = [f"size{index}_{axis}" if size is None else size for axis, size in enumerate(spec.shape)]
    if shape and batch_size is not None:
        shape[0] = batch_size
    elif shape and spec.shape[0] is None:
        shape[0] = "batch"
    for size in shape:
        if isinstance(size, str) and not _NAME.fullmatch(size):
            raise InvalidArgumentError(
                f"An open size must have a name of letters and digits. Received: {size!r} in "
                f"{spec.shape}. Write `'length'`, or None."
            )
    return dataclasses.replace(spec, shape=tuple(shape))
