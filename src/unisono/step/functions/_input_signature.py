"""`input_signature` of `unisono.function`: what its arguments must be, checked before anything is traced.

Tests: tests/virtual/step/test_function_arguments.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError, UnisonoError
from unisono._types import ArrayLike, PyTree
from unisono._values import PerReplica


class InputSignature:
    """The shapes and types of a function's positional arguments.

    Args:
        fn: the function; a first parameter named `self` has no spec.
        specs: one structure of `unisono.data.TensorSpec`, `jax.ShapeDtypeStruct`, or `PerReplica` of
            them (an `element_spec`) for each argument. A dimension of None takes any size.

    Raises:
        InvalidTypeError: when `specs` is not a list or tuple of such structures.
    """

    def __init__(self, fn: Callable[..., object], specs: PyTree) -> None:
        leaves = jax.tree.leaves(specs, is_leaf=_is_per_replica)
        if not isinstance(specs, (list, tuple)) or not all(_is_spec(leaf) for leaf in leaves):
            raise InvalidTypeError(
                "`input_signature` must be a list with a spec, or a structure of specs, for each positional "
                f"argument. Received: {specs}. Write `input_signature=[unisono.data.TensorSpec((None, 3))]`."
            )
        self.specs = specs
        self._parameters = inspect.signature(fn)
        self._skips = int(next(iter(self._parameters.parameters), "") == "self")

    def apply(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, ...]:
        """Return the arguments by position, with numbers and lists as arrays of their spec's type.

        Raises:
            InvalidTypeError: when an argument is missing, is one too many, or has another structure or type.
            InvalidArgumentError: when an array has another shape.
        """
        bound = self._parameters.bind(*args, **kwargs)
        given, by_keyword, specs = bound.args, bound.kwargs, self.specs
        if len(given) < (needed := self._skips + len(specs)):
            bound.apply_defaults()
            given = bound.args[:needed]
        own = given[self._skips :]
        if by_keyword or len(own) != len(specs):
            raise InvalidTypeError(
                f"A call must have an argument for each of the {len(specs)} specs in `input_signature`. "
                f"Received: {len(own)} by position, and by keyword {sorted(by_keyword)}. Let the function "
                "close over the others."
            )
        names = [*self._parameters.parameters][self._skips :] + ["args"] * len(own)
        fitted = [_fitted(*each) for each in zip(own, specs, names, strict=False)]
        return (*given[: self._skips], *fitted)


def _is_per_replica(leaf: object) -> bool:
    return isinstance(leaf, PerReplica)


def _is_spec(leaf: object) -> bool:
    if isinstance(leaf, PerReplica):
        return all(_is_spec(value) for value in leaf.values)
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, (jax.Array, np.ndarray))


def _fitted(argument: PyTree, spec: PyTree, name: str) -> PyTree:
    try:
        # Up to the specs alone: a list of numbers is an array where there is one spec.
        return jax.tree.map(
            lambda one, leaf: _fitted_leaf(leaf, one, name), spec, argument, is_leaf=_is_per_replica
        )
    except UnisonoError:
        raise
    except (ValueError, TypeError) as error:
        raise InvalidTypeError(
            f"The argument {name!r} must have the structure of its spec in `input_signature`, {spec!r}. "
            f"Received: {argument!r}. Pass tuples, lists and dicts as in the spec."
        ) from error


def _fitted_leaf(value: ArrayLike, spec: PyTree, name: str) -> ArrayLike:
    if isinstance(value, PerReplica):
        parts = spec.values if isinstance(spec, PerReplica) else (spec,) * value.num_replicas
        shapes = value.values if value.stacked is None else (value.stacked[0],) * value.num_replicas
        if len(parts) != len(shapes):
            raise _misfit(name, spec, f"values for {len(shapes)} replicas", InvalidTypeError)
        for part, one in zip(shapes, parts, strict=True):
            _check(part, one, name)
        return value
    if isinstance(spec, PerReplica):
        raise _misfit(name, spec, f"{type(value).__name__} without parts for replicas", InvalidTypeError)
    dtype = _canonical(spec)
    if not isinstance(value, jax.Array):
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise _misfit(name, spec, repr(value), InvalidTypeError) from error
        # Ints may become floats and floats narrower; a float must not lose its fraction by becoming an int.
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise _misfit(name, spec, f"dtype {array.dtype}", InvalidTypeError)
        value = array.astype(dtype)
    _check(value, spec, name)
    return value


def _canonical(spec: PyTree) -> np.dtype:
    return jax.dtypes.canonicalize_dtype(spec.dtype)


def _check(array: jax.Array | np.ndarray, spec: PyTree, name: str) -> None:
    if array.dtype != _canonical(spec):
        raise _misfit(name, spec, f"dtype {array.dtype}", InvalidTypeError)
    # As in TensorFlow: any rank.
    if spec.shape is None:
        return
    sizes = zip(array.shape, spec.shape, strict=False)
    if len(array.shape) != len(spec.shape) or any(want not in (None, size) for size, want in sizes):
        raise _misfit(name, spec, f"shape {tuple(array.shape)}", InvalidArgumentError)


def _misfit(name: str, spec: object, received: str, kind: type[Exception]) -> Exception:
    return kind(
        f"The argument {name!r} must fit its spec in `input_signature`, {spec!r}. Received: {received}. "
        "Convert it, or change the spec; a dimension of None takes any size."
    )
