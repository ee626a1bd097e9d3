"""Check the functions and numbers that the user passes to a pipeline.

Tests: tests/unit/data/test_dataset_transforms.py.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import grain
import numpy as np

from unisono._checks import checked_whole, takes_arguments
from unisono._errors import InvalidTypeError
from unisono._types import UserValue
from unisono.data._pipeline._structure import Element, as_element, map_leaves

Function = TypeVar("Function", bound=Callable[..., Any])
#: From a component of an element to its form for users' functions.
View: TypeAlias = Callable[[Any], Any]


def viewing(fn: Function, view: View | None) -> Function:
    """Return a function that is called with another form of each component.

    >>> viewing(lambda x, y: (x, y), str)(1, {"a": 2})
    ('1', {'a': '2'})
    """
    if view is None or not callable(fn) or isinstance(fn, grain.transforms.Map):
        return fn

    @functools.wraps(fn)
    def viewed(*arguments: Any) -> Any:
        return fn(*(map_leaves(view, argument) for argument in arguments))

    return cast(Function, viewed)


def call(fn: Callable[..., Any], element: Element) -> Any:
    """Return `fn` of an element; the parts of a tuple are its arguments, as in `tf.data`."""
    arguments = element if isinstance(element, tuple) else (element,)
    try:
        return fn(*arguments)
    except TypeError:
        if takes_arguments(fn, len(arguments)):
            raise
        if arguments is not element:
            raise InvalidTypeError(
                "A function of elements that are no tuples takes one argument. Received: "
                f"{_name(fn)}, which does not. Write `lambda element: ...`; a dict is one element."
            ) from None
        raise InvalidTypeError(
            f"A function of elements that are tuples takes their {len(element)} parts as arguments. "
            f"Received: {_name(fn)}, which does not. Write `lambda x, y: ...`, or `lambda *element: ...`."
        ) from None


def mapping(fn: Callable[..., Any]) -> Callable[[Element], Element]:
    """Return the function that `map` applies to each element.

    Args:
        fn: The user's function: numpy components in, an element out; or a `grain.transforms.Map`.

    Raises:
        InvalidTypeError: `fn` is not callable; later, when it returns None.

    >>> mapping(lambda x, y: x + y)((1, 2))
    np.int32(3)
    """
    if isinstance(fn, grain.transforms.Map):
        transform: Callable[[Element], Element] = fn.map
        return transform
    checked(fn, "map")

    def mapped(element: Element) -> Element:
        result = call(fn, element)
        if result is None:
            raise InvalidTypeError(
                "map()'s function must return an element. "
                f"Received: None from {_name(fn)}. Add a return statement."
            )
        return as_element(_unlisted(result))

    return mapped


def _unlisted(result: object) -> UserValue:
    # As in tf.data, `return [image, label]` means a tuple, and `return [1, 2]` an array.
    if isinstance(result, list) and not all(
        isinstance(item, (bool, int, float, str, bytes, list)) for item in result
    ):
        return tuple(result)
    return result


def predicate(fn: Callable[..., Any]) -> Callable[[Element], bool]:
    """Return the function that `filter` applies to each element.

    Raises:
        InvalidTypeError: `fn` is not callable; later, when it does not return one truth value.
    """
    checked(fn, "filter")

    def decided(element: Element) -> bool:
        # An array of several truth values is an error here: `bool` of it would raise NumPy's own message,
        # without the name of the function.
        result = np.asarray(call(fn, element))
        if result.shape or result.dtype.kind not in "biu":
            raise InvalidTypeError(
                "filter()'s function must return one truth value. "
                f"Received: shape {result.shape}, dtype {result.dtype} from {_name(fn)}. "
                "Reduce it with .all() or .any()."
            )
        return bool(result)

    return decided


def checked(fn: Callable[..., Any], method: str) -> Callable[..., Any]:
    """Return `fn`, which must be callable."""
    if not callable(fn):
        raise InvalidTypeError(
            f"{method}() needs a function. Received: {fn!r:.200}. Write {_instead_of(fn, method)}."
        )
    return fn


def _instead_of(given: object, method: str) -> str:
    name = getattr(given, "__name__", None)
    # A generator, which the call of a function has made.
    return f"{method}({name}), without a call" if name else f"{method}(lambda element: ...)"


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def seed_or_drawn(seed: int | None) -> int:
    """Return the user's seed, or one drawn from Python's random state.

    As Keras draws its seeds: `keras.utils.set_random_seed` then makes pipelines reproducible, too.
    """
    if seed is None:
        return random.getrandbits(63)
    # NumPy's `SeedSequence` rejects negative numbers, which are valid seeds in tf.data.
    return checked_whole(seed, "seed", -(2**63), "Write seed=42.") % 2**64
