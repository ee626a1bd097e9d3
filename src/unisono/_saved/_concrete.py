"""Functions of given shapes and types, as `get_concrete_function` returns them.

Tests: tests/unit/tf/test_saved_modules.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from keras import ops

from unisono._errors import InvalidTypeError, UnsupportedError
from unisono._export._stablehlo import with_symbols
from unisono._types import PyTree
from unisono.data._pipeline._structure import TensorSpec
from unisono.step._call_signature import NUMBER, Call, Kind
from unisono.step.functions._function import BoundFunction, Function

#: A tensor of unknown rank is one of each of these: StableHLO knows open sizes, and no open ranks.
RANKS = range(5)

#: Types of tensors among the arguments of `get_concrete_function`.
_TENSORS = (TensorSpec, jax.Array, np.ndarray)


def parts_of(function: Function | BoundFunction) -> tuple[Function, tuple[Any, ...]]:
    """Return a function, and the object whose method it is, as the arguments that come first."""
    if isinstance(function, BoundFunction):
        return function.function, function.args
    return function, ()


def by_position(
    function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments by position as far as that can be."""
    try:
        bound = inspect.signature(function.python_function).bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidTypeError(
            f"A function must be called with the arguments that it takes. Received: {error}."
        ) from error
    return bound.args, bound.kwargs


def calls_for(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Call]:
    """Return the calls that arguments stand for: one, or one of each rank that a tensor may have.

    Args:
        args: tensors, `TensorSpec`s and Python's objects, by position.
        kwargs: the same by name.

    Raises:
        UnsupportedError: one of them is a string.
    """
    leaves, structure = jax.tree.flatten(by_position(function, args, kwargs))
    leaves = [_specified(leaf) for leaf in leaves]
    is_open = any(isinstance(leaf, TensorSpec) and leaf.shape is None for leaf in leaves)
    return [_call(structure, leaves, rank) for rank in (RANKS if is_open else [0])]


def _specified(leaf: Any) -> Any:
    """Return the spec of what is an array in a program; other objects as they are."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        leaf = TensorSpec(leaf.shape, leaf.dtype)
    if isinstance(leaf, TensorSpec) and leaf.dtype.kind in "SUO":
        raise UnsupportedError(
            "A function of strings is Python's, and has no form of its own for given shapes. Received: "
            f"{leaf}. Write the function's call, or one of numbers."
        )
    return leaf


def _call(structure: Any, leaves: Sequence[Any], rank: int) -> Call:
    is_array = [isinstance(leaf, (TensorSpec, float)) for leaf in leaves]
    names = [_names(leaf, i, rank) for i, leaf in enumerate(leaves) if isinstance(leaf, TensorSpec)]
    shapes = iter(with_symbols(names))
    parts = [
        (jax.ShapeDtypeStruct(next(shapes), jax.dtypes.canonicalize_dtype(leaf.dtype)),)
        if isinstance(leaf, TensorSpec)
        else (NUMBER,) * array
        for leaf, array in zip(leaves, is_array, strict=True)
    ]
    kinds = tuple(Kind.SAME if array else Kind.STATIC for array in is_array)
    statics = tuple(None if array else leaf for leaf, array in zip(leaves, is_array, strict=True))
    return Call(structure, kinds, tuple(parts), statics)


def with_common_rows(call: Call) -> list[Call]:
    """Return a call whose tensors have one open number of rows in common; none where they have none."""
    shapes = _named_shapes(call)
    opened = [shape for shape in shapes if shape and isinstance(shape[0], str)]
    for shape in opened:
        shape[0] = "rows"
    return [_reshaped(call, shapes)] if len(opened) > 1 else []


def with_sizes(function: Function, call: Call, sizes: Iterable[int]) -> list[Call]:
    """Return a call with those sizes in place of an open one, besides the rows, that a function takes."""
    shapes = _named_shapes(call)
    inner = {size for shape in shapes for size in shape[1:] if isinstance(size, str)}
    calls = []
    for size in sizes if len(inner) == 1 else ():
        sized = _reshaped(call, [[size if name in inner else name for name in shape] for shape in shapes])
        with contextlib.suppress(Exception):  # whatever the user's function raises for another size
            function.stateless(sized)
            calls.append(sized)
    return calls


def _named_shapes(call: Call) -> list[list[int | str]]:
    return [[n if isinstance(n, int) else str(n) for n in x.shape] for x in call.arrays]


def _reshaped(call: Call, shapes: Sequence[Sequence[int | str]]) -> Call:
    arrays = (
        jax.ShapeDtypeStruct(shape, x.dtype, weak_type=x.weak_type)
        for shape, x in zip(with_symbols(shapes), call.arrays, strict=True)
    )
    return dataclasses.replace(call, parts=tuple(tuple(next(arrays) for _ in part) for part in call.parts))


def _names(spec: TensorSpec, index: int, rank: int) -> tuple[int | str, ...]:
    shape = (None,) * rank if spec.shape is None else spec.shape
    return tuple(f"size{index}_{axis}" if size is None else size for axis, size in enumerate(shape))


class ConcreteFunction:
    """A function for tensors of given shapes and types.

    Args:
        function: of `tf.function`, which may be a method of an object.
        args: what it is called with: tensors, `TensorSpec`s and Python's objects.
        kwargs: the same by name.
    """

    def __init__(
        self, function: Function | BoundFunction, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.function, first = parts_of(function)
        signature = self.function.input_specs
        given = signature if signature is not None and not args and not kwargs else args
        #: The calls that are exported.
        self.calls = calls_for(self.function, (*first, *given), kwargs)
        self.function.requested.append(self.calls)
        bound = inspect.signature(self.function.python_function).bind(*first, *given, **kwargs)
        self.number_of_first, self._bound = len(first), bound
        functools.update_wrapper(self, self.function)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Call the function with tensors; Python's objects are those that it was made with."""
        tensors, filled = list(args), dict(self._bound.arguments)
        for name, value in self._bound.arguments.items():
            if not any(isinstance(leaf, _TENSORS) for leaf in jax.tree.leaves(value)):
                continue
            if name in kwargs:
                filled[name] = kwargs.pop(name)
            elif tensors:
                filled[name] = tensors.pop(0)
        if tensors or kwargs:
            raise InvalidTypeError(
                "A concrete function takes the tensors that it was made for; its other arguments have their "
                f"values. Received: {[*tensors, *kwargs]} more. Call the function itself."
            )
        bound = inspect.BoundArguments(self._bound.signature, filled)
        return self.function(*bound.args, **bound.kwargs)

    @property
    def structured_input_signature(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The specs of the arguments, by position and by name."""
        return self._bound.args[self.number_of_first :], self._bound.kwargs

    @property
    def structured_outputs(self) -> PyTree:
        """The specs of the results, in their structure; of shape None where each call has its own rank."""
        every = [_outputs(self.function, call) for call in self.calls]
        return jax.tree.map(lambda *s: s[0] if len({*s}) == 1 else TensorSpec(None, s[0].dtype), *every)


def _outputs(function: Function, call: Call) -> PyTree:
    plan, traced = function.stateless(call)
    values = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in plan.variables]
    return jax.tree.map(spec_of, jax.eval_shape(lambda v, x: arrays_of(traced(v, x)[0]), values, call.arrays))


def arrays_of(result: PyTree) -> PyTree:
    """Return a function's result as arrays: variables as their values, numbers as tensors."""
    return jax.tree.map(lambda leaf: jnp.asarray(ops.convert_to_tensor(leaf)), result)


def spec_of(array: Any) -> TensorSpec:
    """Return the spec of an array, or of what is known of one."""
    shape = [size if isinstance(size, int) else None for size in array.shape]
    return TensorSpec(shape, jnp.dtype(array.dtype))
