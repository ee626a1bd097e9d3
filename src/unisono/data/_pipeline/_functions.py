"""Checks the functions and numbers that the user gives to a pipeline, and says what is wrong with them."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import grain
import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono.data._pipeline._structure import Element, as_element


def call(fn: Callable[..., Any], element: Element) -> Any:
    """Returns `fn` of an element; the parts of a tuple are its arguments, as in `tf.data`."""
    return fn(*element) if isinstance(element, tuple) else fn(element)


def mapping(fn: Callable[..., Any]) -> Callable[[Element], Element]:
    """Returns the function that `map` applies to each element.

    Args:
        fn: From the user: numpy components in, an element out. A `grain.transforms.Map` is taken as well.

    Returns:
        A function of one element.

    Raises:
        InvalidTypeError: `fn` cannot be called; later, where it returns None.

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


def _unlisted(result: Any) -> Any:
    # `return [image, label]` means a tuple, `return [1, 2]` an array: so does tf.data.
    if isinstance(result, list) and not all(
        isinstance(item, (bool, int, float, str, bytes, list)) for item in result
    ):
        return tuple(result)
    return result


def predicate(fn: Callable[..., Any]) -> Callable[[Element], bool]:
    """Returns the function by which `filter` decides.

    Args:
        fn: From the user: numpy components in, one truth value out.

    Returns:
        A function of one element.

    Raises:
        InvalidTypeError: `fn` cannot be called; later, where it does not return one truth value.
    """
    checked(fn, "filter")

    def decided(element: Element) -> bool:
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
    """Returns `fn`, which must be callable.

    Raises:
        InvalidTypeError: It is not.
    """
    if not callable(fn):
        raise InvalidTypeError(
            f"{method}() needs a function. Received: {fn!r:.200}. Write {method}(lambda element: ...)."
        )
    return fn


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def whole(value: Any, name: str, least: int, hint: str) -> int:
    """Returns an argument as an int.

    Args:
        value: From the user.
        name: Of the argument.
        least: The smallest value that can be used.
        hint: What to write instead.

    Returns:
        The int.

    Raises:
        InvalidTypeError: It is no whole number.
        InvalidArgumentError: It is too small.

    >>> whole(np.int64(3), "count", 0, "")
    3
    """
    try:
        number = operator.index(value)
    except TypeError as error:
        raise InvalidTypeError(
            f"{name} must be a whole number. Received: {name}={value!r}. {hint}"
        ) from error
    if number < least:
        raise InvalidArgumentError(f"{name} must be at least {least}. Received: {name}={number}. {hint}")
    return number


def seed_or_drawn(seed: int | None) -> int:
    """Returns a seed; without one, draws it from Python's random state, as Keras does.

    So `keras.utils.set_random_seed` makes pipelines reproducible.

    Args:
        seed: From the user, or None.

    Returns:
        A number from 0 to 2**64 - 1.
    """
    if seed is None:
        return random.getrandbits(63)
    return whole(seed, "seed", -(2**63), "Write seed=42.") % 2**64
